"""Tables of scores: every metric in its place with its spread, and a warning where runs do not compare."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from exlm_cli.finetune.results import GridChoice, Interval
from exlm_cli.finetune.scores import BOTH
from exlm_cli.report.finetuning.scores import (
    label_scores_table,
    results_tables,
    score_entry,
    task_tables,
)
from tests.unit.report.results import SCRATCH, Values, scored

ECFP4, RDKIT = "forest-ecfp4", "forest-rdkit2d"
METRICS: Values = {"roc_auc": [0.7, 0.8], "loss": [0.5, 0.6], "f1": [None, None]}


@pytest.mark.parametrize(
    ("values", "aggregate", "text"),
    [
        ([0.7, 0.8, 0.9], "mean", "0.8000 ± 0.1000"),
        ([0.7, 0.85, 0.9], "median", "0.8500 (0.7000 to 0.9000)"),
        ([0.7], "mean", "0.7000"),
        ([None, 0.7], "median", "0.7000"),
        ([None], "mean", "not defined"),
        ([7.606e-8, 7.606e-8, 8.2e-8], "mean", "7.804e-08 ± 3.429e-09"),
        ([7.606e-8, 9.1e-8], "median", "8.353e-08 (7.606e-08 to 9.1e-08)"),
    ],
)
def test_a_score_is_shown_with_its_spread(values, aggregate, text):
    spread = scored("a", "csv", {"rmse": values}).seeds("rmse")
    assert str(score_entry(spread, aggregate)) == text


def printed(**changed: Any) -> list[str]:
    metrics: Values = {"roc_auc": [0.7, 0.8, 0.9], "loss": [0.5, 0.6, 0.7], "accuracy": [0.5, None, None]}
    stream = io.StringIO()
    Console(file=stream, width=80).print(*results_tables(scored("a", "moleculenet/bace", metrics, **changed)))
    return stream.getvalue().splitlines()


def test_the_metric_that_chose_the_epoch_comes_first_and_everything_fits():
    lines = printed(notes=("left out 5 rows",))
    assert max(map(len, lines)) <= 80
    rows = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("loss", "accuracy", "roc_auc")]
    assert rows == ["roc_auc", "accuracy", "roc_auc", "accuracy", "loss"]
    text = " ".join(" ".join(lines).split())
    for words in (
        "1,210/151/152 rows",
        "smiles-small pre-trained for 1,200 steps and fine-tuned, 3 seeds", "note: left out 5 rows",
        "best epochs by validation roc_auc: 3, 6, 9", "trainings took 1:02:05 together, at 12,346 tokens/s each",
    ):  # fmt: skip
        assert words in text


def test_scratch_one_seed_a_grid_and_the_baselines_are_named():
    run = scored(
        "a", "moleculenet/bace", {"roc_auc": [0.7], "loss": [0.5]}, init=SCRATCH, seeds=(7,),
        grid_best=GridChoice(label="lr-1e-05", values={"optim.lr": 1e-5, "train.max_epochs": 3}),
        grid=(GridChoice(label="a", values={}),) * 3,
        forests={ECFP4: {"roc_auc": [0.8]}, RDKIT: {"roc_auc": [0.9]}},
    )  # fmt: skip
    (table,) = results_tables(run)
    assert table.title.endswith("smiles-small from scratch, seed 7")
    assert "best of 3 grid points: optim.lr=1e-05, train.max_epochs=3" in table.notes
    assert table.groups == (
        (("roc_auc", "0.7000", "0.7000"), ("loss", "0.5000", "0.5000")),
        (("ECFP4 + random forest", "", ""), ("roc_auc", "0.8000", "0.8000")),
        (("RDKit 2D + random forest", "", ""), ("roc_auc", "0.9000", "0.9000")),
    )
    assert not [note for note in table.notes if "±" in note or "mean prediction" in note]


def test_the_mean_prediction_comes_first_and_every_spread_is_named():
    metrics: Values = {"roc_auc": [0.7, 0.9], "loss": [0.5, 0.7]}
    run = scored("a", "csv", metrics, averages={"roc_auc": 0.875}, forests={ECFP4: {"roc_auc": [0.6, 0.8]}})
    (table,) = results_tables(run)
    assert table.groups == (
        (("roc_auc", "0.8750", "0.8750"),),
        (("exlm, single seeds", "", ""), ("roc_auc", *["0.8000 ± 0.1414"] * 2), ("loss", *["0.6000 ± 0.1414"] * 2)),
        (("ECFP4 + random forest", "", ""), ("roc_auc", "0.7000", "0.7000")),
    )
    assert table.notes[0].startswith("the first scores are those of the seeds' mean prediction, ")
    assert table.notes[0].endswith("those of single seeds are mean ± standard deviation of 2 seeds, each scored alone")
    (table,) = results_tables(scored("a", "csv", {"f1": [0.5, 0.9, 0.6]}, aggregate="median"))
    assert table.groups[1][1] == ("f1", *["0.6000 (0.5000 to 0.9000)"] * 2)
    assert table.notes[0].endswith("single seeds are median (lowest to highest) of 3 seeds, each scored alone")


def test_the_interval_over_the_test_rows_is_a_note():
    interval = Interval(low=0.25, high=0.75, over="rows", num=198)
    (table,) = results_tables(scored("a", "csv", {"roc_auc": [0.7]}, rows_interval=interval))
    assert "95 % interval of roc_auc over the 198 test rows, 2,000 resamples: 0.2500 to 0.7500" in table.notes


def test_each_run_has_a_column_and_each_task_a_table():
    runs = [
        scored("one", "csv", METRICS, forests={ECFP4: {"roc_auc": [0.6, 0.6]}}),
        scored("two", "csv", {"roc_auc": [0.9], "accuracy": [0.5]}),
        scored("other", "glue/rte", {"accuracy": [0.5, 0.7, 0.6]}),
    ]
    first, second = task_tables(runs)
    assert first.columns == ("metric", "one", "two", "ECFP4 + random forest")
    assert first.groups == (
        (("roc_auc", "0.7500", "0.9000", "0.6000"), ("f1", "-", "-", "-"), ("accuracy", "-", "0.5000", "-")),
        (
            ("roc_auc, single seeds", "0.7500 ± 0.0707", "0.9000", "0.6000 ± 0.0000"),
            ("f1, single seeds", "-", "-", "-"),
            ("accuracy, single seeds", "-", "0.5000", "-"),
            ("loss, single seeds", "0.5500 ± 0.0707", "-", "-"),
        ),
    )
    assert first.title == "csv, 1,210/151/152 rows in train, valid, test, scored on test"
    budget = "smiles-small (exlm), pre-training 1,200 steps, 13.1 M tokens, 5.2 M parameters"
    assert first.notes[1:] == (f"one: {budget}, 2 seeds", f"two: {budget}, seed 1")
    assert second.name == "scores-glue-rte"
    assert second.rows == (("accuracy", "0.6000"), ("accuracy, single seeds", "0.6000 (0.5000 to 0.7000)"))
    (alone,) = task_tables([scored("two", "csv", {"roc_auc": [0.9], "loss": [0.5]})])
    assert alone.rows == (("roc_auc", "0.9000"), ("loss", "0.5000"))


def test_runs_with_common_seeds_have_their_paired_difference_from_the_first():
    """Differences of 0.02, 0.03 and 0.01: mean 0.02, deviation 0.01, t(2) at 97.5 % is 4.3027, p of t = 3.4641."""
    first = scored("mlm", "moleculenet/bace", {"roc_auc": [0.7, 0.8, 0.9]})
    second = scored("exlm", "moleculenet/bace", {"roc_auc": [0.72, 0.83, 0.91]})
    (table,) = task_tables([first, second])
    assert table.notes[-1] == (
        "mean difference of exlm from mlm, roc_auc: +0.0200 (95 % interval -0.0048 to +0.0448, 3 seeds in pairs, "
        "p = 0.074)"
    )
    for values in ([0.72, 0.83], [0.72, 0.83, None], [0.75, 0.85, 0.95]):  # two pairs; no deviation
        other = scored("exlm", "moleculenet/bace", {"roc_auc": values})
        assert "difference" not in task_tables([first, other])[0].notes[-1]


REPLICATED: Any = {"split": "random", "split_seeds": (0, 1), "forests": {ECFP4: {"roc_auc": [0.6, 0.8]}}}


def test_scores_over_replicated_splits_stand_beside_the_baseline_over_the_same_splits():
    (table,) = task_tables([scored("one", "csv", {"roc_auc": [0.7, 0.9]}, **REPLICATED)])
    assert table.rows == (("roc_auc", "0.8000 ± 0.1414", "0.7000 ± 0.1414"),)
    assert table.notes[0] == "mean ± standard deviation over 2 splits"


def test_of_several_splits_and_seeds_the_mean_predictions_of_the_splits_come_first():
    """Their means over the seeds of a split are 0.6 and 0.8; the four seeds have a deviation of their own."""
    run = scored("one", "csv", {"roc_auc": [0.5, 0.7, 0.7, 0.9]}, split="random", split_seeds=(0, 1))
    (table,) = results_tables(run)
    assert table.rows[0] == ("roc_auc", "0.7000 ± 0.1414", "0.7000 ± 0.1414")
    assert table.rows[2] == ("roc_auc", "0.7000 ± 0.1633", "0.7000 ± 0.1633")
    assert table.notes[0].endswith("mean ± standard deviation of 2 splits with 2 seeds each, each scored alone")
    assert table.notes[1] == "mean ± standard deviation over 2 splits of the mean prediction"


def test_notes_of_a_run_of_several_splits_are_of_all_of_them_or_name_the_first():
    over = {name: Interval(low=low, high=0.75, over="splits", num=2) for name, low in (("f1", 0.5), ("roc_auc", 0.25))}
    run = scored(
        "one", "csv", {"roc_auc": [0.7, 0.9]}, notes=("split 0: test: a note",), split_intervals=over,
        grid_best=GridChoice(label="lr-1e-05", values={"optim.lr": 1e-5}), **REPLICATED,
    )  # fmt: skip
    (table,) = results_tables(run)
    assert table.notes[1:] == (
        "split 0: test: a note",
        "first split: best of 0 grid points: optim.lr=1e-05",
        "best epochs by validation roc_auc: 3",
        "95 % intervals on test over splits: roc_auc 0.2500 to 0.7500, f1 0.5000 to 0.7500",
        "trainings took 1:02:05 together, at 12,346 tokens/s each",
    )


def test_runs_of_different_splits_have_a_baseline_each_and_a_warning():
    def forest(area: float) -> Any:
        return {ECFP4: {"roc_auc": [area] * 2}}

    runs = [
        scored("one", "csv", METRICS, forests=forest(0.6)),
        scored("two", "csv", METRICS, forests=forest(0.5), split="random", split_sha256="cd" * 32),
        scored("three", "csv", METRICS, forests=forest(0.6)),
    ]
    (table,) = task_tables(runs)
    assert table.columns[4:] == ("ECFP4 + random forest, rows of one", "ECFP4 + random forest, rows of two")
    assert table.rows[0][4:] == ("0.6000", "0.5000")
    assert "one scaffold abababab, two random cdcdcdcd, three scaffold abababab" in table.notes[-1]


def test_the_mean_of_model_and_baseline_is_a_column_of_each_run():
    """Runs on the same rows have the same baseline, which is a column once."""
    forests = [{ECFP4: {"roc_auc": [0.6] * 2}, BOTH: {"roc_auc": [both] * 2}} for both in (0.7, 0.8)]
    runs = [scored(name, "csv", METRICS, forests=of) for name, of in zip(("one", "two"), forests, strict=True)]
    (table,) = task_tables(runs)
    assert table.columns[3:] == ("ECFP4 + random forest", "both, one and baseline", "both, two and baseline")
    assert table.rows[0][3:] == ("0.6000", "0.7000", "0.8000")


def test_a_run_on_one_split_is_not_compared_with_one_on_several():
    one = scored("one", "csv", {"roc_auc": [0.7]}, split="random", forests={ECFP4: {"roc_auc": [0.6]}})
    (table,) = task_tables([one, scored("two", "csv", {"roc_auc": [0.7, 0.9]}, **REPLICATED)])
    assert table.columns[3:] == ("ECFP4 + random forest, rows of one", "ECFP4 + random forest, rows of two")
    assert table.notes[-1] == (
        "these runs were split differently and cannot be compared: one random abababab, "
        "two random abababab and 1 more split"
    )


def test_tables_of_unrelated_csv_files_are_apart_and_have_names_of_their_own():
    metrics: dict[str, list[float | None]] = {"roc_auc": [0.5]}
    runs = [scored("a", "csv", metrics), scored("b", "csv", metrics), scored("c", "csv", metrics, labels_sha256="ab")]
    runs.append(scored("d", "csv", metrics, output_names=("toxic",)))
    tables = task_tables(runs)
    assert [table.columns[1:] for table in tables] == [("a", "b"), ("c",), ("d",)]
    assert [table.name for table in tables] == ["scores-csv", "scores-csv-2", "scores-csv-3"]


def test_several_values_have_a_table_of_their_own_errors_beside_the_baseline():
    """Errors are in the unit of each value: a mean of 0.5 and 9 would say nothing."""
    labels: Any = {
        name: {metric: [value] for metric in ("rmse", "mae", "r2")} for name, value in (("logP", 0.5), ("TPSA", 9.0))
    }
    run = scored(
        "a", "csv", {"standardised_rmse": [0.4]}, loss="regression", is_greater_better=False, labels=labels,
        output_names=("logP", "TPSA"), forests={ECFP4: {"standardised_rmse": [0.5]}},
    )  # fmt: skip
    _, table = results_tables(run)
    assert table.columns == ("value", "rmse", "mae", "r2", "rmse of ECFP4 + random forest")
    assert table.rows == (
        ("logP", "0.5000", "0.5000", "0.5000", "0.5000"),
        ("TPSA", "9.0000", "9.0000", "9.0000", "9.0000"),
    )


@pytest.mark.parametrize(("num", "has_note"), [(30, False), (31, True)])
def test_of_many_labels_the_first_30_are_shown_and_a_note_counts_them(num, has_note):
    scores = {f"assay {n}": {"roc_auc": 0.5, "average_precision": math.nan, "accuracy": 0.25} for n in range(num)}
    predicted = label_scores_table(scores)
    assert predicted.columns == ("label", "roc_auc", "average_precision", "accuracy")
    assert predicted.rows == tuple((f"assay {n}", "0.5000", "not defined", "0.2500") for n in range(30))
    assert predicted.notes == (("the first 30 of 31; the JSON output has all",) if has_note else ())
    labels: Any = {name: {metric: [v] for metric, v in of.items()} for name, of in scores.items()}
    _, table = results_tables(scored("a", "csv", {"roc_auc": [0.5]}, labels=labels, output_names=tuple(labels)))
    assert (table.title, table.columns, table.rows) == ("test: each label alone", predicted.columns, predicted.rows)
    assert table.notes == (("the first 30 of 31; scores.csv has all",) if has_note else ())


def test_predicted_values_have_their_errors():
    table = label_scores_table({"logP": {"r2": -1.0, "rmse": 0.5, "mae": 0.25}})
    assert table.title == "Each value alone"
    assert (table.columns, table.rows) == (("value", "rmse", "mae", "r2"), (("logP", "0.5000", "0.2500", "-1.0000"),))


def test_seeds_and_splits_are_counted_and_weights_drawn_from_the_seed_had_no_pre_training():
    for seeds, split_seeds, said in (
        ((7,), (0,), "seed 7"),
        ((7, 8), (0,), "2 seeds"),
        ((7,), (0, 1), "2 splits with a seed each"),
        ((7, 8), (0, 1), "2 splits with 2 seeds each"),
    ):
        values: Values = {"roc_auc": [0.7] * len(seeds) * len(split_seeds)}
        run = scored("a", "csv", values, seeds=seeds, split_seeds=split_seeds, init=SCRATCH)
        (table,) = task_tables([run])
        (note,) = [note for note in table.notes if note.startswith("a: smiles-small (scratch), pre-training none, ")]
        assert note.endswith(f", {said}")
        assert results_tables(run)[0].title.endswith(f", {said}")


def test_runs_are_compared_over_the_seeds_that_both_have():
    """The seeds 2, 3 and 4 are in both runs; there the differences are 0.02, 0.03 and 0.01, with a mean of 0.02."""
    first = scored("mlm", "csv", {"roc_auc": [0.5, 0.7, 0.8, 0.9]})
    second = scored("exlm", "csv", {"roc_auc": [0.72, 0.83, 0.91, 0.1]}, seeds=(2, 3, 4, 9))
    (table,) = task_tables([first, second])
    assert "roc_auc: +0.0200 (95 % interval -0.0048 to +0.0448, 3 seeds in pairs" in table.notes[-1]


def test_runs_of_several_splits_have_no_paired_difference():
    """Their values are by split and seed, more than there are seeds, so no value belongs to a seed alone."""
    runs = [scored(name, "csv", {"roc_auc": [0.7, 0.9, 0.8]}, split_seeds=(0, 1, 2)) for name in ("one", "two")]
    (table,) = task_tables(runs)
    assert not [note for note in table.notes if "difference" in note]
