"""Tables of scores: every metric in its place with its spread, and a warning where runs do not compare."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from exlm_cli.experiments.evaluate import PretrainedScore
from exlm_cli.finetune.results import BaselineResult, GridChoice, GridScores, summarise_values
from exlm_cli.report.scores import (
    format_score,
    label_scores_table,
    pretraining_table,
    results_tables,
    task_tables,
)
from tests.unit.report.results import SCRATCH, Values, baseline, replicated, scored

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
    assert format_score(summarise_values(values), aggregate) == text


def printed(**changed: Any) -> list[str]:
    metrics: Values = {"roc_auc": [0.7, 0.8, 0.9], "loss": [0.5, 0.6, 0.7], "accuracy": [0.5, None, None]}
    stream = io.StringIO()
    Console(file=stream, width=80).print(*results_tables(scored("a", "moleculenet/bace", metrics, **changed).results))
    return stream.getvalue().splitlines()


def test_the_metric_that_chose_the_epoch_comes_first_and_everything_fits():
    lines = printed(notes=("left out 5 rows",))
    assert max(map(len, lines)) <= 80
    rows = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("loss", "accuracy", "roc_auc")]
    assert rows == ["roc_auc", "accuracy", "loss"]
    text = " ".join(lines)
    for words in (
        "1,210/151/152 rows", "exlm smiles-small after 1,200 steps", "note: left out 5 rows",
        "best epochs by validation roc_auc: 3, 6, 9", "trained in 1:02:05, 12,346 tokens/s, 1.2 %",
    ):  # fmt: skip
        assert words in text


def test_scratch_one_seed_a_grid_and_the_baseline_are_named():
    lines = printed(
        init=SCRATCH,
        seeds=(7,),
        grid_best=GridChoice(label="lr-1e-05", values={"optim.lr": 1e-5, "train.max_epochs": 3}),
        grid=(GridScores(label="a", values={}, valid={}),) * 3,
        baseline=baseline({"roc_auc": [0.7, 0.8, 0.9], "loss": [0.5]}),
    )
    text = "\n".join(lines)
    assert "scratch smiles-small, seed 7" in text
    assert "best of 3 grid points: optim.lr=1e-05, train.max_epochs=3" in text
    assert "ECFP4 + random forest" in text
    assert text.count("0.8000 ± 0.1000") == 4


def test_each_run_has_a_column_and_each_task_a_table():
    runs = [
        scored("one", "csv", METRICS, baseline=baseline({"roc_auc": [0.6, 0.6]})),
        scored("two", "csv", {"roc_auc": [0.9], "accuracy": [0.5]}),
        scored("other", "glue/rte", {"accuracy": [0.5, 0.7, 0.6]}),
    ]
    first, second = task_tables(runs)
    assert first.columns == ("metric", "one", "two", "ECFP4 + random forest")
    assert first.rows == (
        ("roc_auc", "0.7500 ± 0.0707", "0.9000", "0.6000 ± 0.0000"),
        ("f1", "-", "-", "-"),
        ("accuracy", "-", "0.5000", "-"),
        ("loss", "0.5500 ± 0.0707", "-", "-"),
    )
    assert first.title == "csv, 1,210/151/152 rows in train, valid, test, scored on test"
    budget = "smiles-small (exlm), pre-training 1,200 steps, 13.1 M tokens, 5.2 M parameters"
    assert first.notes == (f"one: {budget}, mean of 2 seeds", f"two: {budget}, seed 1")
    assert (second.name, second.rows) == ("scores-glue-rte", (("accuracy", "0.6000 (0.5000 to 0.7000)"),))


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


def test_scores_over_replicated_splits_stand_beside_the_baseline_over_the_same_splits():
    run = scored(
        "one", "csv", {"roc_auc": [0.7]}, split="random", baseline=baseline({"roc_auc": [0.6]}),
        replication=replicated({"roc_auc": [0.7, 0.9]}, {"roc_auc": [0.6, 0.8]}),
    )  # fmt: skip
    (table,) = task_tables([run])
    assert table.rows == (("roc_auc", "0.8000 ± 0.1414", "0.7000 ± 0.1414"),)


def test_notes_of_a_run_of_several_splits_are_of_all_of_them_or_name_the_first():
    """The run itself was trained for 1:02:05, with its best epoch 3; both splits together as `replicated` says."""
    run = scored(
        "one", "csv", {"roc_auc": [0.7]}, split="random", notes=("test: a note",),
        grid_best=GridChoice(label="lr-1e-05", values={"optim.lr": 1e-5}),
        replication=replicated({"roc_auc": [0.7, 0.9]}, {"roc_auc": [0.6, 0.8]}),
    )  # fmt: skip
    (table,) = results_tables(run.results)
    assert table.notes == (
        "first split: test: a note",
        "first split: best of 0 grid points: optim.lr=1e-05",
        "best epochs by validation roc_auc: 3, 8",
        "95 % intervals on test over splits: roc_auc 0.5000 to 0.7500",
        "trained in 2:02:05, 500 tokens/s, 25.0 % of the time outside the model",
    )


def test_runs_of_different_splits_have_a_baseline_each_and_a_warning():
    runs = [
        scored("one", "csv", METRICS, baseline=baseline({"roc_auc": [0.6]})),
        scored("two", "csv", METRICS, baseline=baseline({"roc_auc": [0.5]}), split="random", split_sha256="cd" * 32),
        scored("three", "csv", METRICS, baseline=baseline({"roc_auc": [0.6]})),
    ]
    (table,) = task_tables(runs)
    assert table.columns[4:] == ("ECFP4 + random forest, rows of one", "ECFP4 + random forest, rows of two")
    assert table.rows[0][4:] == ("0.6000", "0.5000")
    assert "one scaffold abababab, two random cdcdcdcd, three scaffold abababab" in table.notes[-1]


def test_a_run_on_one_split_is_not_compared_with_one_on_several():
    run = {"split": "random", "baseline": baseline({"roc_auc": [0.6]})}
    over = replicated({"roc_auc": [0.7, 0.9]}, {"roc_auc": [0.5, 0.7]})
    runs = [scored("one", "csv", METRICS, **run), scored("two", "csv", METRICS, replication=over, **run)]
    (table,) = task_tables(runs)
    assert table.columns[3:] == ("ECFP4 + random forest, rows of one", "ECFP4 + random forest, rows of two")
    assert table.notes[-1] == (
        "these runs were split differently and cannot be compared: one random abababab, "
        "two random abababab and 1 more split"
    )


def test_pretrained_checkpoints_have_a_column_each_with_the_data_that_they_were_scored_on():
    exlm = PretrainedScore(
        "a", "runs/a/checkpoints/step-30", "exlm", 30, 649_508, 55_600, "one", "19 sequences of x.txt",
        {"loss": 2.5, "perplexity": 12.18, "entropy_bits": math.nan, "effective_states": 1.5, "num_sequences": 1900.0},
    )  # fmt: skip
    mlm = PretrainedScore("b", "c", "mlm", 1000, 1, 5, "other", "x", {"loss": 2.0, "perplexity": 12345.6})
    table = pretraining_table([exlm, mlm])
    assert {row[0]: row[1:] for row in table.rows} == {
        "loss, nats per target": ("2.5000", "2.0000"),
        "perplexity": ("12.1800", "12,345.6"),
        "entropy, bits": ("not defined", "-"),
        "effective states per mask": ("1.5000", "-"),
        "sequences scored": ("1,900", "-"),
    }
    assert table.notes[0] == "a: exlm, step 30, 0.6 M parameters, 55.6 k tokens, scored on 19 sequences of x.txt"
    assert table.notes[2].startswith("these runs have different tokenizers")
    assert len(pretraining_table([exlm, exlm]).notes) == 2


def test_tables_of_unrelated_csv_files_are_apart_and_have_names_of_their_own():
    metrics: dict[str, list[float | None]] = {"roc_auc": [0.5]}
    runs = [scored("a", "csv", metrics), scored("b", "csv", metrics), scored("c", "csv", metrics, labels_sha256="ab")]
    runs.append(scored("d", "csv", metrics, output_names=("toxic",)))
    tables = task_tables(runs)
    assert [table.columns[1:] for table in tables] == [("a", "b"), ("c",), ("d",)]
    assert [table.name for table in tables] == ["scores-csv", "scores-csv-2", "scores-csv-3"]


def test_several_values_have_a_table_of_their_own_errors_beside_the_baseline():
    """Errors are in the unit of each value: a mean of 0.5 and 9 would say nothing."""
    of_label = {
        name: {metric: summarise_values([value]) for metric in ("rmse", "mae", "r2")}
        for name, value in (("logP", 0.5), ("TPSA", 9.0))
    }
    forest = BaselineResult(name="forest", seeds=(1,), metrics={"test": {}}, labels={"test": of_label})
    run = scored(
        "a", "csv", {"standardised_rmse": [0.4]}, loss="regression", is_greater_better=False, labels={"test": of_label},
        output_names=("logP", "TPSA"), baseline=forest,
    )  # fmt: skip
    _, table = results_tables(run.results)
    assert table.columns == ("value", "rmse", "mae", "r2", "rmse of forest")
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
    labels = {name: {metric: summarise_values([v]) for metric, v in of.items()} for name, of in scores.items()}
    run = scored("a", "csv", {"roc_auc": [0.5]}, labels={"test": labels}, output_names=tuple(labels))
    _, table = results_tables(run.results)
    assert (table.title, table.columns, table.rows) == ("test: each label alone", predicted.columns, predicted.rows)
    assert table.notes == (("the first 30 of 31; `labels` in results.json has all",) if has_note else ())


def test_predicted_values_have_their_errors():
    table = label_scores_table({"logP": {"r2": -1.0, "rmse": 0.5, "mae": 0.25}})
    assert table.title == "Each value alone"
    assert (table.columns, table.rows) == (("value", "rmse", "mae", "r2"), (("logP", "0.5000", "0.2500", "-1.0000"),))


def test_seeds_and_splits_are_counted_and_weights_drawn_from_the_seed_had_no_pre_training():
    over = replicated({"roc_auc": [0.7, 0.9]}, {"roc_auc": [0.6, 0.8]})
    for seeds, replication, said in (
        ((7,), None, "seed 7"),
        ((7, 8), None, "mean of 2 seeds"),
        ((7,), over, "mean of 2 splits with a seed each"),
        ((7, 8), over, "mean of 2 splits with 2 seeds each"),
    ):
        run = scored("a", "csv", {"roc_auc": [0.7] * len(seeds)}, seeds=seeds, replication=replication, init=SCRATCH)
        (table,) = task_tables([run])
        assert table.notes[0].startswith("a: smiles-small (scratch), pre-training none, ")
        assert table.notes[0].endswith(f", {said}")
        assert results_tables(run.results)[0].title.endswith(f", {said}")


def test_runs_are_compared_over_the_seeds_that_both_have():
    """The seeds 2, 3 and 4 are in both runs; there the differences are 0.02, 0.03 and 0.01, with a mean of 0.02."""
    first = scored("mlm", "csv", {"roc_auc": [0.5, 0.7, 0.8, 0.9]})
    second = scored("exlm", "csv", {"roc_auc": [0.72, 0.83, 0.91, 0.1]}, seeds=(2, 3, 4, 9))
    (table,) = task_tables([first, second])
    assert "roc_auc: +0.0200 (95 % interval -0.0048 to +0.0448, 3 seeds in pairs" in table.notes[-1]


def test_runs_of_several_splits_have_no_paired_difference():
    """Their values are by split and seed, more than there are seeds, so no value belongs to a seed alone."""
    replication = replicated({"roc_auc": [0.7, 0.9, 0.8]}, {"roc_auc": [0.6, 0.8]})
    runs = [scored(name, "csv", {"roc_auc": [0.7]}, replication=replication) for name in ("one", "two")]
    (table,) = task_tables(runs)
    assert not [note for note in table.notes if "difference" in note]
