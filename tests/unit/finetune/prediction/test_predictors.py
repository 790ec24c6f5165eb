"""Model, baseline or both: what is best in validation is chosen there, kept in the run, and predicts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exlm_cli.api.run import Run
from exlm_cli.files import write_json
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.evaluation.calibration import (
    Calibration,
    ConformalResiduals,
    read_calibration,
    read_scored_split,
)
from exlm_cli.finetune.evaluation.scoring import SplitOutcome, calibrate_run
from exlm_cli.finetune.prediction.predict import predict
from exlm_cli.finetune.prediction.training_rows import read_training_rows
from exlm_cli.finetune.predictions import PartRows, read_seed_predictions
from exlm_cli.finetune.results import FinetunedRun, read_results
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.finetune.scores import BOTH, MODEL, PREDICTORS, read_scores
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder
from tests.unit.finetune.finetuned_runs import SMILES, finetune, read_rows, write_rows
from tests.unit.finetune.synthetic import finetune_recipe, grow_little

NAMES = ("forest-ecfp4", "forest-rdkit2d", "boosting")
BINARY = (".safetensors", ".npz")
"""Weights of models and of baselines."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [[smiles, f"{len(smiles) + 0.3 * (i % 5)}"] for i, smiles in enumerate(SMILES * 6)]
    return write_rows(tmp_path_factory.mktemp("table") / "assay.csv", ["smiles", "y"], rows)


@pytest.fixture(scope="module")
def few_trees() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        grow_little(patch)
        yield


@pytest.fixture(scope="module")
def run(table: Path, smiles_model: Path, few_trees: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = {"name": "csv", "files": {"train": str(table)}, "label_columns": ["y"], "split": "random"}
    folder = tmp_path_factory.mktemp("several")
    return finetune(folder, smiles_model, baseline=True, num_replicates=2, **task)


def test_what_is_best_in_validation_is_in_results_verdict_and_scores(run):
    results, scores = read_results(run), read_scores(run)
    found = results.predictors
    assert scores.others == [*NAMES, BOTH]
    assert found.valid["both"] == pytest.approx(scores.average("valid", "rmse", model=BOTH).mean)
    assert found.best == min(PREDICTORS, key=lambda name: found.valid[name])
    assert f"`exlm predict {run} FILE`" in FinetunedRun("run", run, results).verdict[0]
    for forest, split in zip(found.baselines, (0, 1), strict=True):
        values = {name: scores.by_split("valid", "rmse", name)[split] for name in NAMES}
        assert values[forest] == min(values.values())


def test_two_splits_have_an_interval_over_the_rows_within_them(run):
    results = read_results(run)
    interval, mean = results.rows_interval, read_scores(run).average("test", "rmse").mean
    assert interval.num == sum(len(rows_and_truth(run, split, "test")[0]) for split in (0, 1))
    assert interval.low < mean < interval.high
    assert [found.over for found in results.comparison.intervals] == ["rows"]


def written(run: Path, of_split: Any, part: Any, predictor: str) -> np.ndarray:
    """Return the (K, N) values that the files of a run give for a part of a split, by a predictor."""
    rows, _ = rows_and_truth(run, of_split.split_seeds[0], part)
    (baseline,) = of_split.predictors.baselines
    names = {"model": [None], "baseline": [baseline], "both": [None, baseline]}[predictor]
    found = [read_seed_predictions(run, of_split, {part: rows}, baseline=name)[part] for name in names]
    return np.mean(found, axis=0)[..., 0]


def test_every_predictor_is_scored_on_the_mean_of_what_its_seeds_wrote(run):
    """`both` is the mean of model and best baseline; each baseline is scored for every seed alone, too."""
    scores = read_scores(run)
    for split, of_split in enumerate(read_results(run).of_splits):
        for predictor in PREDICTORS:
            errors_N = written(run, of_split, "test", predictor).mean(axis=0) - rows_and_truth(run, split, "test")[1]
            found = scores.by_split("test", "rmse", of_split.scored_as(predictor))[split]
            assert found == pytest.approx(np.sqrt(np.mean(errors_N**2)))
    for name in NAMES:
        assert scores.by_seed("test", "rmse", model=name).seed.tolist() == ["1", "2"] * 2


def rows_and_truth(run: Path, split: int, part: str) -> tuple[Any, Any]:
    """Return the rows of a part of a split, and their values in the table."""
    path = run / ("splits/split-1.json" if split else "split.json")
    rows = np.array(json.loads(path.read_text())["indices"][part])
    return rows, np.array([len(SMILES[row % len(SMILES)]) + 0.3 * (row % 5) for row in rows])


def table_of(finetuned: Any, path: Path, out: Path, predictor: Any) -> tuple[np.ndarray, Any]:
    done = predict(finetuned, path, out, folder=out.parent, predictor=predictor, progress=SilentProgress())
    return np.array([float(row["y_predicted"]) for row in read_rows(out)]), done


def test_predictions_are_means_over_seeds_and_splits_of_what_training_wrote(run, table, tmp_path):
    """Each row of the table is a test row of one split at most, so each split's own test rows are compared."""
    whole, smiles = load_finetuned(run, device="cpu"), [row["smiles"] for row in read_rows(table)]
    for predictor in PREDICTORS:
        found, summary = table_of(whole, table, tmp_path / "out.csv", predictor)
        assert summary.predictor == predictor
        by_split = []
        for split, of_split in enumerate(whole.results.of_splits):
            runners = (whole.runners, *whole.others)[split]
            alone = replace(whole, results=of_split, runners=runners, others=())
            values, _ = table_of(alone, table, tmp_path / "out.csv", predictor)
            rows, _ = rows_and_truth(run, split, "test")
            np.testing.assert_allclose(values[rows], written(run, of_split, "test", predictor).mean(axis=0), atol=1e-6)
            by_split.append(values)
        np.testing.assert_allclose(found, np.mean(by_split, axis=0), atol=1e-6)
        in_memory = Run(run, whole, SilentProgress()).predict(smiles, predictor=predictor)
        np.testing.assert_allclose(in_memory.y_predicted, found, atol=1e-9)


def test_each_predictor_has_a_calibration_over_the_validation_rows_of_all_splits(run):
    """Each as its own split predicts them."""
    kept = []
    for split, of_split in enumerate(read_results(run).of_splits):
        _, truth_N = rows_and_truth(run, split, "valid")
        kept.append(np.abs(written(run, of_split, "valid", "model").mean(axis=0) - truth_N))
    (output,) = read_calibration(run).outputs
    assert isinstance(output, ConformalResiduals)
    np.testing.assert_allclose(output.residuals[0], np.sort(np.concatenate(kept)))
    for predictor in PREDICTORS:
        (other,) = read_calibration(run, predictor).outputs
        assert isinstance(other, ConformalResiduals)
        assert len(other.residuals[0]) == len(output.residuals[0])


def outcome(valid: range, residuals: Any, test: range) -> Any:
    """Return what is calibrated of a split that predicts 0, with these residuals on its validation rows."""
    rows: Any = {
        "valid": PartRows(np.array(valid), np.array(residuals, dtype=float)[:, None]),
        "test": PartRows(np.array(test), np.ones((len(test), 1))),
    }
    predicted = {MODEL: {part: np.zeros((2, len(of_part.rows), 1)) for part, of_part in rows.items()}}
    results = SimpleNamespace(loss="regression", output_names=("y",), scored_as=lambda _: MODEL)
    # calibration reads neither the split nor the scores
    return SplitOutcome(None, results, None, predicted, rows)  # type: ignore[arg-type]


def test_a_calibration_is_scored_on_rows_that_it_was_not_fitted_to():
    """The second split is validated on test rows of the first, with errors of 100, and on others, with errors of 2."""
    first = outcome(range(10), [1] * 10, test=range(10, 20))
    second = outcome(range(10, 30), [100] * 10 + [2] * 10, test=range(10))
    found = calibrate_run([first, second], "model")
    assert found.outputs == (ConformalResiduals(residuals=((1.0,) * 10 + (2.0,) * 10,)),)
    assert found.test == {"y": {"interval_coverage": 1.0, "interval_width": 4.0}}


def test_intervals_of_new_rows_take_the_distance_to_the_training_rows_of_each_split(run, table, tmp_path):
    """As that of a validation row is to those of its own split: a row of one split alone is not near."""
    known = read_training_rows(run)
    of_each = [
        {SMILES[row % len(SMILES)] for row in rows_and_truth(run, split, "train")[0].tolist()} for split in (0, 1)
    ]
    near_SR = known.nearest_tanimoto(SMILES, SilentProgress())
    for near_R, trained in zip(near_SR, of_each, strict=True):
        assert [near == 1 for near in near_R] == [smiles in trained for smiles in SMILES]
    output = ConformalResiduals(residuals=((1.0,) * 9, (2.0,) * 9, (3.0,) * 9), cuts=(0.0, 0.5))
    again = shutil.copytree(run, tmp_path / "again")
    write_json(again / "calibration.json", Calibration(outputs=(output,)))
    found, _ = table_of(load_finetuned(again, device="cpu"), table, tmp_path / "out.csv", "model")
    for row, value in zip(read_rows(tmp_path / "out.csv"), found, strict=True):
        near = near_SR[:, SMILES.index(row["smiles"])]
        assert float(row["nearest_train_tanimoto"]) == pytest.approx(near.max(), abs=1e-4)
        width = 1 if near.mean() == 1 else 2 if near.mean() >= 0.5 else 3
        assert float(row["y_high_90"]) - value == pytest.approx(width, rel=1e-6)


def test_a_resumed_run_grows_what_it_needs_and_nothing_else(run, tmp_path, monkeypatch):
    again = shutil.copytree(run, tmp_path / "again")
    grown = sorted(again.rglob("forests.npz"))
    before = grown[0].read_bytes()
    grown[0].unlink()
    (again / "results.json").unlink()
    grow_little(monkeypatch)
    progress = Recorder()
    resume_finetuning(again, progress=progress)
    assert grown[0].read_bytes() == before
    assert len([bar for bar in progress.bars if " + " in bar.label]) == 1
    assert (again / "results.json").read_bytes() == (run / "results.json").read_bytes()


@pytest.mark.usefixtures("few_trees")
def test_permuted_test_labels_change_no_weight_no_choice_and_no_calibration(smiles_model, tmp_path):
    found = []
    for name, turn in (("as they are", 0), ("permuted", 5)):
        parts = ["train"] * 40 + ["valid"] * 20 + ["test"] * 12
        values = [f"{len(smiles) + 0.3 * (i % 5)}" for i, smiles in enumerate(SMILES * 6)]
        values[60:] = [*values[60 + turn :], *values[60 : 60 + turn]]
        rows = [list(row) for row in zip(SMILES * 6, values, parts, strict=True)]
        path = write_rows(tmp_path / f"{name}.csv", ["smiles", "y", "part"], rows)
        task = {"name": "csv", "files": {"train": str(path)}, "label_columns": ["y"], "split_column": "part"}
        recipe = finetune_recipe(seeds=[1], task=task, train={"max_epochs": 2, "microbatch_tokens": 2048})
        out = tmp_path / name
        results = run_finetuning(recipe, checkpoint=smiles_model, out=out, baseline=True).results
        kept = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.suffix in BINARY}
        fitted = [read_calibration(out, predictor).outputs for predictor in PREDICTORS]
        found.append((kept, results.predictors, results.best_epochs, fitted, results.comparison))
    one, other = found
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1], "the test scores do differ"


def test_reports_have_the_test_rows_of_all_splits_as_what_predicts_predicts_them(run):
    """A row is as the first split that tests it predicts it; further ones without those that calibrated."""
    results = read_results(run)
    rows = read_scored_split(run, results)
    first, second = (
        json.loads(path.read_text())["indices"] for path in (run / "split.json", run / "splits/split-1.json")
    )
    more = [row for row in second["test"] if row not in {*first["test"], *first["valid"], *second["valid"]}]
    assert more
    assert rows.rows.tolist() == [*first["test"], *more]
    assert len(rows.inputs) == len(rows.places) == len(rows.rows)
    wanted = [
        written(run, of_split, "test", results.predictors.best)[:, [part["test"].index(row) for row in kept]]
        for of_split, part, kept in zip(results.of_splits, (first, second), (first["test"], more), strict=True)
    ]
    np.testing.assert_allclose(rows.by_seed[..., 0], np.concatenate(wanted, axis=1))
    assert rows.calibration == read_calibration(run, results.predictors.best)
