"""Our rows beside the paper's: columns, rows, warnings; the paper's numbers agree with each other as rounded."""

import math

import pytest

from exlm_cli.config.tasks import SUITES
from exlm_cli.report.experiments.paper import SHAPES, TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_13, paper_tables
from exlm_cli.tasks.glue import GLUE_TASKS
from tests.unit.report.results import EXLM, SCRATCH, scored

MLM = EXLM.model_copy(update={"sha256": "a1" * 32, "recipe": "smiles-small-mlm", "objective": "mlm"})
TEXT = EXLM.model_copy(update={"sha256": "7e" * 32, "recipe": "text-small", "steps": 10, "tokens": 900})


ECFP4 = "forest-ecfp4"


def cell(table, row, column):
    (found,) = [cells for cells in table.rows if cells[1] == row]
    return found[table.columns.index(column)]


def ours(table):
    return [row[1] for row in table.rows if row[0] == "ours"]


def test_every_column_is_a_task_and_metric_that_there_is():
    for shape in SHAPES:
        assert {*shape.scores, shape.mean[0]} == set(shape.paper.columns)
        for task, metric in shape.scores.values():
            suite, _, name = task.partition("/")
            assert task in SUITES[suite].tasks
            if suite == "glue":
                assert metric.removeprefix("mismatched_") == GLUE_TASKS[name].metrics[0]


SHORT_NAMES = [task.partition("/")[2] for task in SUITES["moleculenet"].tasks]


def test_runs_of_one_model_share_a_row_below_the_papers_and_all_tasks_make_a_mean():
    """The checkpoint of one run was moved, or comes from the Hub: its weights are the same. No table has a CSV."""
    values = {task: 0.5 + 0.01 * index for index, task in enumerate(SHORT_NAMES)}
    runs = [scored(task, f"moleculenet/{task}", {"roc_auc": [value, value]}) for task, value in values.items()]
    moved = EXLM.model_copy(update={"checkpoint": "pre/checkpoints/step-1200"})
    runs[3] = scored(SHORT_NAMES[3], runs[3].results.task, {"roc_auc": [values[SHORT_NAMES[3]]] * 2}, init=moved)
    runs.append(scored("mlm", "moleculenet/bace", {"roc_auc": [0.3, 0.4]}, init=MLM))
    runs.append(scored("scratch", "moleculenet/bace", {"roc_auc": [None]}, init=SCRATCH))
    runs.append(scored("mine", "csv", {"roc_auc": [0.7]}))
    (table,) = paper_tables(runs)
    assert table.name == "table-1"
    assert [row[1] for row in table.rows if row[0] == "paper"] == list(TABLE_1.rows)
    names = ("smiles-small (exlm)", "smiles-small-mlm (mlm)", "smiles-small (scratch)")
    assert ours(table) == [*names]
    for row, cells in {
        "N-Gram RF": {"ToxCast": "-"},
        "ExLM": {"Mean": "76.1", "seeds": "3"},
        names[0]: {"Mean": f"{100 * sum(values.values()) / 7:.1f}", "pre-training": "1,200 steps, 13.1 M tokens"},
        names[1]: {"BACE": "35.0 ± 7.1", "BBBP": "-", "Mean": "-", "seeds": "2", "parameters": "5.2 M"},
        names[2]: {"BACE": "-", "pre-training": "none"},
    }.items():
        assert {column: cell(table, row, column) for column in cells} == cells
    assert "not the paper's" not in " ".join(table.notes)


def test_a_second_run_of_a_task_and_another_model_of_one_name_get_rows_of_their_own():
    """Those rows are filled too: each run goes into the first row of its weights that lacks its task."""
    other = EXLM.model_copy(update={"sha256": "0f" * 32})
    runs = [
        scored("a", "moleculenet/bace", {"roc_auc": [0.7]}),
        scored("b", "moleculenet/bace", {"roc_auc": [0.8]}),
        scored("c", "moleculenet/bbbp", {"roc_auc": [0.9]}, init=other),
        scored("d", "moleculenet/bace", {"roc_auc": [0.6]}, init=other),
        scored("e", "moleculenet/bbbp", {"roc_auc": [0.4]}),
        scored("f", "moleculenet/bbbp", {"roc_auc": [0.5]}),
    ]
    (table,) = paper_tables(runs)
    assert ours(table) == ["smiles-small (exlm)", "smiles-small (exlm) [b]", "smiles-small (exlm) [c]"]
    assert [cell(table, name, "BACE") for name in ours(table)] == ["70.0", "80.0", "60.0"]
    assert [cell(table, name, "BBBP") for name in ours(table)] == ["40.0", "50.0", "90.0"]


def test_other_splits_seeds_and_numbers_of_rows_than_the_benchmarks_are_noted():
    """Those of the benchmarks are Table 9's, and the numbers of rows of GLUE and SQuAD 2.0 that their papers give."""
    sizes = {"train": 2_490, "valid": 30}
    runs = [
        scored("rte", "glue/rte", {"accuracy": [0.5]}, split_sizes=sizes),
        scored("own", "glue/rte", {"accuracy": [0.5]}, split_sizes=sizes, split="files"),
        scored("few", "glue/rte", {"accuracy": [0.5]}, split_sizes=sizes, max_valid_rows=30, max_rows=2490),
        scored("mnli", "glue/mnli", {"accuracy": [0.5]}, split_sizes={"train": 392_702, "valid": 9_815 + 9_832}),
        scored("squad", "squad/v2", {"f1": [0.5, 0.5]}, split_sizes={"train": 130_319, "valid": 11_873}),
        scored("small", "squad/v2", {"f1": [0.5]}, split_sizes={"train": 4, "valid": 3}),
    ]
    (table,) = paper_tables(runs)
    _, other_split, other_rows, *limited = table.notes
    assert other_split.endswith(": own (files)")
    assert other_rows.endswith(
        ": rte (valid 30 instead of 277); small (train 4 instead of 130,319, valid 3 instead of 11,873)"
    )
    assert [note.partition("(`")[2] for note in limited] == [
        "task.max_rows`): few (2,490 rows)", "task.max_valid_rows`): few (30 rows)",
    ]  # fmt: skip
    assert cell(table, "smiles-small (exlm)", "seeds") == "1 or 2"
    bace = {"train": 1210, "valid": 151, "test": 152}  # KANO's file, with the row that Table 9 rounds off
    (table,) = paper_tables([scored("a", "moleculenet/bace", {"roc_auc": [0.7]}, split_sizes=bace)])
    assert not any("number of rows" in note for note in table.notes)


def test_a_baseline_is_a_row_without_a_budget_over_the_splits_where_the_scores_are():
    forests = {ECFP4: {"roc_auc": [0.6, 0.8]}, "forest-rdkit2d": {"roc_auc": [0.9, 0.9]}}
    run = scored("a", "moleculenet/bace", {"roc_auc": [0.7, 0.9]}, forests=forests, split_seeds=(0, 1))
    (table,) = paper_tables([run, scored("b", "moleculenet/bbbp", {"roc_auc": [0.7, 0.8]})])
    names = ["smiles-small (exlm)", "ECFP4 + random forest", "RDKit 2D + random forest"]
    assert ours(table) == names
    assert [cell(table, name, "BACE") for name in names] == ["80.0 ± 14.1", "70.0 ± 14.1", "90.0 ± 0.0"]
    assert cell(table, names[1], "BBBP") == cell(table, names[1], "pre-training") == "-"
    assert "single seeds on all splits" in table.notes[0]


def test_table_3_has_medians_of_glue_and_squad_and_a_score_of_zero_counts_in_the_mean():
    """A classifier that always gives the same answer has a Matthews correlation of 0 on CoLA."""
    shape = next(shape for shape in SHAPES if shape.paper is TABLE_3)
    values = dict(zip(shape.mean[1], (0.8, 0.9, 0.7, 0.6, 0.0, 0.5, 0.4, 0.3), strict=True))
    assert (shape.scores["CoLA"][1], values["CoLA"]) == ("matthews_corrcoef", 0)
    runs = []
    for column, value in values.items():
        task, metric = shape.scores[column]
        more = {"mismatched_accuracy": [0.4, 0.5, 0.9]} if column == "MNLI-m" else {}
        runs.append(scored(column, task, {metric: [value - 0.3, value, value + 0.1], **more}, init=TEXT))
    runs.append(scored("s", "squad/v2", {"f1": [0.3, 0.5], "exact_match": [0.2, 0.2]}, init=TEXT))
    (table,) = paper_tables(runs)
    assert table.name == "table-3"
    found = {column: cell(table, "text-small (exlm)", column) for column in TABLE_3.columns}
    others = {"MNLI-mm": "50.0", "MEAN": "52.5", "EM": "20.0", "F1": "40.0"}
    assert found == {column: f"{100 * value:.1f}" for column, value in values.items()} | others
    assert "medians" in table.notes[0]


THE_PAPERS_OWN_SLIPS = {(3, "ExLM large")}
"""It prints 86.9 for a mean of 86.79."""


def test_every_row_has_a_number_of_one_digit_or_a_dash_for_each_column():
    for table in (TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_13):
        assert all(len(numbers) == len(table.columns) for numbers in table.rows.values())
        assert set(table.budgets) <= set(table.rows)
        known = [number for numbers in table.rows.values() for number in numbers if number is not None]
        assert all(0 < number < 100 and number == round(number, 1) for number in known)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"table-{shape.paper.number}")
def test_printed_means_are_those_of_the_printed_numbers(shape):
    """A number printed with one digit is at most 0.05 off, so is a mean of such, and the printed mean once more."""
    column, members = shape.mean
    values = {row: [shape.paper.value(row, member) for member in members] for row in shape.paper.rows}
    printed = {row: shape.paper.value(row, column) for row in values}
    whole = {row: math.fsum(of_row) / len(of_row) for row, of_row in values.items() if None not in of_row}
    assert whole.keys() == {row for row, value in printed.items() if value is not None}
    assert len(whole) >= 4
    slips = {(shape.paper.number, row) for row, mean in whole.items() if abs(printed[row] - mean) > 0.1 + 1e-9}
    assert slips == {slip for slip in THE_PAPERS_OWN_SLIPS if slip[0] == shape.paper.number}


def test_what_the_paper_says_of_its_tables_in_words_holds():
    """§5.1: ExLM is best on 5 of 7 tasks and on average, and beats SMILES-BERT on all. §5.2: ExLM beats RoBERTa on
    everything and is best of the base models on 7 of 8 GLUE tasks (TUPE on MRPC) and on SQuAD.
    """
    tasks = TABLE_1.columns[:-1]
    best = [max((TABLE_1.value(row, task) or 0, row) for row in TABLE_1.rows)[1] for task in tasks]
    assert best.count("ExLM") == 5
    assert max((TABLE_1.value(row, "Mean") or 0, row) for row in TABLE_1.rows)[1] == "ExLM"
    for table, other in ((TABLE_1, "SMILES-BERT (MLM)"), (TABLE_3, "RoBERTa (MLM)")):
        assert all(table.value("ExLM", column) > table.value(other, column) for column in table.columns)
    base = [row for row in TABLE_3.rows if row != "ExLM large"]
    others = {column: max((TABLE_3.value(row, column) or 0, row) for row in base)[1] for column in TABLE_3.columns}
    assert {column for column, row in others.items() if row != "ExLM"} == {"MRPC"}
    assert others["MRPC"] == "TUPE"
