"""Tables of scores: every metric in its place with its spread, and a warning where runs do not compare."""

import math
import re
from dataclasses import replace

import pytest

from exlm_cli.files import write_json
from exlm_cli.finetune.evaluation.calibration import CALIBRATION_FILE, Calibration, ConformalResiduals, Coverage
from exlm_cli.finetune.results import GridChoice, Interval
from exlm_cli.report.finetuning.scores import (
    interval_tables,
    label_scores_table,
    models_table,
    results_tables,
    score_entry,
    task_tables,
)
from tests.unit.report.results import SCRATCH, scored

ECFP4, RDKIT = "forest-ecfp4", "forest-rdkit2d"
METRICS = {"roc_auc": [0.7, 0.8], "loss": [0.5, 0.6], "f1": [None, None]}


@pytest.mark.parametrize(
    ("values", "aggregate", "text"),
    [
        ([0.7, 0.8, 0.9], "mean", "0.8000 ± 0.1000"),
        ([0.7, 0.85, 0.9], "median", "0.8500 (0.7000 to 0.9000)"),
        ([0.7], "mean", "0.7000"),
        ([None, 0.7], "median", "0.7000"),
        ([None], "mean", "not defined"),
        ([7.606e-8, 7.606e-8, 8.2e-8], "mean", "7.804e-08 ± 3.429e-09"),
    ],
)
def test_a_score_is_shown_with_its_spread(values, aggregate, text):
    spread = scored("a", "csv", {"rmse": values}).seeds("rmse")
    assert str(score_entry(spread, aggregate)) == text


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


def test_the_mean_prediction_comes_first_and_every_spread_and_model_is_named():
    """On the page each has a row, with a column for each metric and for what chose the epoch."""
    forests = {ECFP4: {"roc_auc": [0.6, 0.8]}, "a model of tomorrow": {"roc_auc": [0.6, 0.6]}}
    metrics = {"roc_auc": [0.7, 0.9], "loss": [0.5, 0.7]}
    run = scored("a", "csv", metrics, averages={"roc_auc": 0.875}, forests=forests)
    (table,) = results_tables(run)
    assert table.groups == (
        (("roc_auc", "0.8750", "0.8750"),),
        (("exlm, single seeds", "", ""), ("roc_auc", *["0.8000 ± 0.1414"] * 2), ("loss", *["0.6000 ± 0.1414"] * 2)),
        (("ECFP4 + random forest", "", ""), ("roc_auc", "0.7000", "0.7000")),
        (("a model of tomorrow", "", ""), ("roc_auc", "0.6000", "0.6000")),
    )
    on_page = models_table(run)
    assert on_page.columns == ("model", "roc_auc", "valid roc_auc")
    scores = {"exlm": "0.8750", "exlm, single seeds": "0.8000 ± 0.1414", "ECFP4 + random forest": "0.7000"}
    assert on_page.rows == tuple((name, *[v] * 2) for name, v in (scores | {"a model of tomorrow": "0.6000"}).items())
    (table,) = results_tables(scored("a", "csv", {"f1": [0.5, 0.9, 0.6]}, aggregate="median"))
    assert table.groups[1][1] == ("f1", *["0.6000 (0.5000 to 0.9000)"] * 2)


def test_intervals_have_the_share_of_each_third_that_is_inside_with_wilson_s_interval(tmp_path):
    """Wilson, of p = 0 at n rows: from 0 to z^2 / (n + z^2), which is 16.1 % of 20."""
    ends = ((1.0, 0.81, 20), (0.8, 0.61, 20), (0.6, 0.41, 0))
    parts = tuple(Coverage(most=m, least=n, num_rows=20, num_inside=i, mean_width=2.0) for m, n, i in ends)
    calibration = Calibration(outputs=(ConformalResiduals(residuals=((1.0,) * 40,)),), coverage={"logS": parts})
    write_json(tmp_path / CALIBRATION_FILE, calibration)
    run = scored("run", "csv", {"rmse": [0.5]}, loss="regression", output_names=("logS",))
    (table,) = interval_tables(replace(run, run_dir=tmp_path))
    assert table.rows == (
        ("Tanimoto similarity 1 to 0.81", "20", "100.0 %", "83.9 % to 100.0 %", "2.0000"),
        ("Tanimoto similarity 0.8 to 0.61", "20", "100.0 %", "83.9 % to 100.0 %", "2.0000"),
        ("Tanimoto similarity 0.6 to 0.41", "20", "0.0 %", "0.0 % to 16.1 %", "2.0000"),
    )
    assert "fewer than 50 validation rows: `logS`" in table.notes[1]


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
    assert second.name == "scores-glue-rte"
    assert second.rows == (("accuracy", "0.6000"), ("accuracy, single seeds", "0.6000 (0.5000 to 0.7000)"))


def test_runs_with_common_seeds_have_their_paired_difference_from_the_first():
    """Differences of 0.02, 0.03 and 0.01 of the seeds 2, 3 and 4, which are in both runs.

    Their mean is 0.02, their deviation 0.01, t(2) at 97.5 % is 4.3027, p of t = 3.4641.
    """
    first = scored("mlm", "moleculenet/bace", {"roc_auc": [0.5, 0.7, 0.8, 0.9]})
    second = scored("exlm", "moleculenet/bace", {"roc_auc": [0.72, 0.83, 0.91, 0.1]}, seeds=(2, 3, 4, 9))
    (table,) = task_tables([first, second])
    assert re.findall(r"[+-]\d\.\d+|p = [\d.]+\d", table.notes[-1]) == ["+0.0200", "-0.0048", "+0.0448", "p = 0.074"]
    # two pairs; no deviation; values of splits, none of which belongs to a seed alone
    for values, splits in (([0.7, 0.8], (0,)), ([0.6, 0.8, 0.9, 1.0], (0,)), ([0.7, 0.9, 0.8, 0.7], (0, 1))):
        other = scored("exlm", "moleculenet/bace", {"roc_auc": values}, split_seeds=splits)
        assert "difference" not in task_tables([first, other])[0].notes[-1]


def test_of_several_splits_and_seeds_the_mean_predictions_of_the_splits_come_first():
    """Their means over the seeds of a split are 0.6 and 0.8; the four seeds have a deviation of their own."""
    forests = {ECFP4: {"roc_auc": [0.6, 0.6, 0.8, 0.8]}}
    values = {"roc_auc": [0.5, 0.7, 0.7, 0.9]}
    over = {"roc_auc": Interval(low=0.25, high=0.75, over="splits", num=2)}
    run = scored("one", "csv", values, split="random", split_seeds=(0, 1), forests=forests, split_intervals=over)
    (table,) = results_tables(run)
    assert any("roc_auc 0.2500 to 0.7500" in note for note in table.notes)
    assert table.rows[0] == ("roc_auc", "0.7000 ± 0.1414", "0.7000 ± 0.1414")
    assert table.rows[2] == ("roc_auc", "0.7000 ± 0.1633", "0.7000 ± 0.1633")


def test_runs_of_different_splits_have_a_baseline_each_and_a_warning():
    better, worse = ({ECFP4: {"roc_auc": [area] * 2}} for area in (0.6, 0.5))
    runs = [
        scored("one", "csv", METRICS, forests=better),
        scored("two", "csv", METRICS, forests=worse, split="random", split_sha256="cd" * 32),
        scored("three", "csv", METRICS, forests=better),
    ]
    (table,) = task_tables(runs)
    assert table.columns[4:] == ("ECFP4 + random forest, rows of one", "ECFP4 + random forest, rows of two")
    assert table.rows[0][4:] == ("0.6000", "0.5000")
    assert "cannot be compared" in table.notes[-1]
    assert "two random cdcdcdcd" in table.notes[-1]


def test_tables_of_unrelated_csv_files_are_apart_and_have_names_of_their_own():
    metrics = {"roc_auc": [0.5]}
    runs = [scored("a", "csv", metrics), scored("b", "csv", metrics), scored("c", "csv", metrics, labels_sha256="ab")]
    runs.append(scored("d", "csv", metrics, output_names=("toxic",)))
    tables = task_tables(runs)
    assert [table.columns[1:] for table in tables] == [("a", "b"), ("c",), ("d",)]
    assert [table.name for table in tables] == ["scores-csv", "scores-csv-2", "scores-csv-3"]


def test_several_values_have_a_table_of_their_own_errors_beside_the_baseline():
    """Errors are in the unit of each value: a mean of 0.5 and 9 would say nothing."""
    labels = {
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


def test_of_many_labels_the_first_30_are_shown_and_a_note_counts_them():
    scores = {f"assay {n}": {"roc_auc": 0.5, "average_precision": math.nan, "accuracy": 0.25} for n in range(31)}
    predicted = label_scores_table(scores)
    assert predicted.columns == ("label", "roc_auc", "average_precision", "accuracy")
    assert predicted.rows == tuple((f"assay {n}", "0.5000", "not defined", "0.2500") for n in range(30))
    assert predicted.notes == ("the first 30 of 31; the JSON output has all",)
    labels = {name: {metric: [v] for metric, v in of.items()} for name, of in scores.items()}
    _, table = results_tables(scored("a", "csv", {"roc_auc": [0.5]}, labels=labels, output_names=tuple(labels)))
    assert (table.title, table.columns, table.rows) == ("test: each label alone", predicted.columns, predicted.rows)
    assert table.notes == ("the first 30 of 31; scores.csv has all",)
