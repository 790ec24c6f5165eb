"""What a run is called, what kind it is, and what its seeds predicted, from files alone."""

from pathlib import Path

import numpy as np
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.experiments.scores import (
    load_finetuned_run,
    load_seed_predictions,
)
from exlm_cli.finetune.results import read_results, write_predictions


def test_predictions_of_all_seeds_score_what_the_results_say(molecules: Path) -> None:
    """The mean over labels of the share of right rows, from the files, is the `accuracy` of each seed."""
    run = load_finetuned_run(molecules, "mine")
    predictions = load_seed_predictions(run)
    assert predictions is not None
    assert (run.scored_split, predictions.split, len(predictions.probabilities)) == ("test", "test", 2)
    for probabilities, accuracy in zip(
        predictions.probabilities, read_results(molecules).metrics["test"]["accuracy"].values, strict=True
    ):
        is_known = ~np.isnan(predictions.targets)
        is_right = (probabilities >= 0.5) == (predictions.targets == 1)
        shares = [right[known].mean() for right, known in zip(is_right.T, is_known.T, strict=True) if known.any()]
        assert accuracy == pytest.approx(np.mean(shares), abs=1e-12)
    assert run.summary("roc_auc") == run.results["metrics"]["test"]["roc_auc"]
    assert run.summary("no such") is None


def test_a_run_without_targets_has_no_curves_and_one_with_other_rows_is_refused(
    molecules: Path, tmp_path: Path
) -> None:
    run = load_finetuned_run(molecules, "mine")
    elsewhere = type(run)("mine", tmp_path, run.results)
    assert load_seed_predictions(elsewhere) is None
    write_predictions(tmp_path / "targets-test.csv", [7], ["active"], [np.array([1.0])])
    for seed in (1, 2):
        cell = tmp_path / f"cells/single/seed-{seed}"
        cell.mkdir(parents=True)
        write_predictions(cell / "predictions-test.csv", [8], ["active"], [np.array([0.5])])
    with pytest.raises(CheckpointError, match=r"seed-1/predictions-test\.csv: its rows are not those of"):
        load_seed_predictions(elsewhere)


def test_a_run_that_is_not_finished_names_the_command_that_finishes_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_finetuned_run(tmp_path, "mine")
    assert caught.value.message == f"{tmp_path}: the run is not finished: it has no results.json"
    assert caught.value.hint == f"finish it with `exlm finetune --resume {tmp_path}`"
