"""Runs of one task side by side: every metric in its place, and a warning where runs do not compare."""

import math

from exlm_cli.experiments.scores import PretrainedScore
from exlm_cli.finetune.results import summarise_values
from exlm_cli.report.score_tables import pretraining_table, task_tables
from exlm_cli.report.score_text import as_is, percent, pretraining_budget
from tests.unit.report.scored_runs import scored, yardstick

METRICS: dict[str, list[float | None]] = {"roc_auc": [0.7, 0.8], "loss": [0.5, 0.6], "f1": [None, None]}


def test_numbers_are_written_for_people() -> None:
    assert (
        pretraining_budget({"objective": "exlm", "steps": 4000, "tokens": 13_100_000}) == "4,000 steps, 13.1 M tokens"
    )
    assert pretraining_budget({"objective": "scratch", "steps": 0, "tokens": 0}) == "none"
    summary = summarise_values([0.7, 0.8]).as_json()
    assert (percent(summary, "mean"), percent(summary, "median")) == ("75.0 ± 7.1", "75.0")
    assert percent(summarise_values([0.7]).as_json(), "mean") == "70.0"
    assert percent(None, "mean") == percent(summarise_values([None]).as_json(), "mean") == as_is(None, "mean") == "-"


def test_each_run_has_a_column_and_the_metric_that_chose_comes_first() -> None:
    runs = [
        scored("one", "csv", METRICS, yardstick=yardstick({"roc_auc": [0.6, 0.6]})),
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
    assert first.notes == (
        "one: smiles-small (exlm), pre-training 1,200 steps, 13.1 M tokens, 5.23 M parameters, mean of 2 seeds",
        "two: smiles-small (exlm), pre-training 1,200 steps, 13.1 M tokens, 5.23 M parameters, seed 1",
    )
    assert (second.name, second.rows) == ("scores-glue-rte", (("accuracy", "0.6000 (0.5000 to 0.7000)"),))


def test_runs_of_different_splits_have_a_yardstick_each_and_a_warning() -> None:
    runs = [
        scored("one", "csv", METRICS, yardstick=yardstick({"roc_auc": [0.6]})),
        scored("two", "csv", METRICS, yardstick=yardstick({"roc_auc": [0.5]}), split="random", split_sha256="cd" * 32),
        scored("three", "csv", METRICS, yardstick=yardstick({"roc_auc": [0.6]})),
    ]
    (table,) = task_tables(runs)
    assert table.columns[4:] == ("ECFP4 + random forest, rows of one", "ECFP4 + random forest, rows of two")
    assert table.rows[0][4:] == ("0.6000", "0.5000")
    assert table.notes[-1] == (
        "these runs were split differently and cannot be compared: one scaffold abababab, two random cdcdcdcd, "
        "three scaffold abababab"
    )


def test_pretrained_checkpoints_have_a_column_each_with_what_they_were_scored_on() -> None:
    exlm = PretrainedScore(
        "a", "runs/a/checkpoints/step-30", "exlm", 30, 649_508, 55_600, "19 sequences of x.txt",
        {"loss": 2.5, "perplexity": 12.18, "entropy_bits": 3.0, "effective_states": 1.5, "num_sequences": 1900.0},
    )  # fmt: skip
    mlm = PretrainedScore("b", "c", "mlm", 1000, 1, 5, "x", {"loss": 2.0, "perplexity": 12345.6})
    table = pretraining_table([exlm, mlm])
    assert {row[0]: row[1:] for row in table.rows} == {
        "loss, nats per target": ("2.5000", "2.0000"),
        "perplexity": ("12.1800", "12345.6000"),
        "entropy, bits": ("3.0000", "-"),
        "effective states per mask": ("1.5000", "-"),
        "sequences scored": ("1,900", "-"),
    }
    assert table.notes[0] == ("a: exlm, step 30, 650 k parameters, 55.6 k tokens, scored on 19 sequences of x.txt")


def test_an_entropy_that_is_not_defined_is_told() -> None:
    metrics = {"loss": 2.0, "entropy_bits": math.nan}
    table = pretraining_table([PretrainedScore("a", "run", "mlm", 6, 1000, 1000, "its own", metrics)])
    assert table.rows[1] == ("entropy, bits", "not defined")
