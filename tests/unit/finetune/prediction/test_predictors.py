"""Model, baseline or both: what is best in validation is chosen there, kept in the run, and predicts."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.api import load
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.evaluation.blend import best_share, blend
from exlm_cli.finetune.evaluation.calibration import read_calibration
from exlm_cli.finetune.evaluation.conformal import ConformalResiduals, error_signs
from exlm_cli.finetune.finished import FinetunedRun
from exlm_cli.finetune.prediction.predict import predict
from exlm_cli.finetune.results import read_predictions, read_results, read_seed_outputs
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.finetune.scores import BOTH, predictors_with, read_scores
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder
from tests.unit.finetune.finetuned_runs import SMILES, read_rows, write_rows
from tests.unit.finetune.synthetic import finetune_recipe

NAN = math.nan
OF_FORESTS = predictors_with("forest-ecfp4")
RNG = np.random.default_rng(3)
FOREST_DEFAULTS = "exlm_cli.finetune.baselines.baseline.grow_forests.__kwdefaults__"


def errors(share: float, *parts: Any) -> float:
    model, forest, truth = parts
    return float(np.nansum((blend(share, model, forest) - truth) ** 2))


@pytest.mark.parametrize("loss", ["binary", "regression"])
def test_the_share_has_the_least_squared_error(loss):
    """By a search over a fine grid; missing targets count for nothing."""
    truth = RNG.random((60, 1)).round() if loss == "binary" else RNG.normal(size=(60, 1))
    truth[::7] = NAN
    model, forest = truth + RNG.normal(size=(60, 1)), truth + 1.5 * RNG.normal(size=(60, 1))
    model, forest = (np.nan_to_num(values, nan=9.0) for values in (model, forest))
    share = best_share(loss, model, forest, truth)
    grid = np.linspace(0, 1, 1001)
    assert share == pytest.approx(grid[np.argmin([errors(one, model, forest, truth) for one in grid])], abs=1e-3)
    assert 0.5 < share < 1


def test_the_share_of_classes_is_that_of_their_brier_score():
    truth = np.array([[0.0], [2], [1], [NAN], [0]])
    right = np.nan_to_num((truth == np.arange(3)).astype(float))
    model, forest = 0.9 * right + 0.1 / 3, np.full((5, 3), 1 / 3)
    assert best_share("classes", model, forest, truth) == 1
    assert best_share("classes", forest, model, truth) == 0
    assert best_share("classes", model, model, truth) == 0.5


def test_columns_of_values_count_the_same_whatever_their_unit():
    truth = RNG.normal(size=(50, 2))
    model, forest = truth + RNG.normal(size=(50, 2)), truth + RNG.normal(size=(50, 2))
    scale = np.array([1.0, 1e6])
    shares = [best_share("regression", m * u, f * u, t * u) for m, f, t, u in [
        (model, forest, truth, 1.0), (model, forest, truth, scale),
    ]]  # fmt: skip
    assert shares[0] == pytest.approx(shares[1])


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [[smiles, f"{len(smiles) + 0.3 * (i % 5)}", str(i % 2)] for i, smiles in enumerate(SMILES * 6)]
    return write_rows(tmp_path_factory.mktemp("table") / "assay.csv", ["smiles", "y", "z"], rows)


@pytest.fixture(scope="module")
def few_trees() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "exlm_cli.finetune.baselines.baseline.grow_forests.__kwdefaults__", {"num_trees": 8, "num_threads": 1}
        )
        yield


def make(table: Path, start: Path, out: Path, label: str = "y", **changes: Any) -> Path:
    task = {"name": "csv", "files": {"train": str(table)}, "label_columns": [label], "split": "random"}
    train = {"max_epochs": 1, "microbatch_tokens": 2048, "num_threads": 1}
    recipe = finetune_recipe(**{"seeds": [1, 2], "task": task, "train": train} | changes)
    return run_finetuning(recipe, checkpoint=start, out=out, baseline=True).run_dir


@pytest.fixture(scope="module")
def run(table: Path, smiles_model: Path, few_trees: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(table, smiles_model, tmp_path_factory.mktemp("several") / "run", num_replicates=2)


def test_what_is_best_in_validation_is_in_results_verdict_and_scores(run):
    results, scores = read_results(run), read_scores(run)
    found = results.predictors
    assert found is not None
    assert len(found.baselines) == len(found.shares) == 2
    assert scores.others == ["forest-ecfp4", "forest-rdkit2d", BOTH]
    assert found.valid["both"] == pytest.approx(scores.average("valid", "rmse", model=BOTH).mean)
    assert found.best == min(OF_FORESTS, key=lambda name: found.valid[name])
    assert results.verdict[0].startswith("Predict new rows with `exlm predict RUN FILE`. It uses ")
    assert f" with `exlm predict {run} FILE`. It" in FinetunedRun("run", run, results).verdict[0]
    for forest, split in zip(found.baselines, (0, 1), strict=True):
        values = {name: scores.by_split("valid", "rmse", name)[split] for name in ("forest-ecfp4", "forest-rdkit2d")}
        assert values[forest] == min(values.values())
        kept = sorted(str(path.relative_to(run / "baselines")) for path in run.rglob("forests.npz"))
        assert f"{forest}/split-{split}/seed-1/forests.npz" in kept
    assert len(kept) == 4


def test_both_is_the_weighted_mean_in_the_run(run):
    results = read_results(run)
    for of_split in results.of_splits:
        folder = f"split-{of_split.split_seeds[0]}/seed-2/predictions-test.csv"
        (forest,), (share,) = of_split.predictors.baselines, of_split.predictors.shares
        _, both = read_predictions(run / "baselines" / BOTH / folder, "")
        _, of_forest = read_predictions(run / "baselines" / forest / folder, "")
        _, of_model = read_predictions(run / "cells/single" / folder, "", num_columns=1)
        np.testing.assert_allclose(both, share * of_model + (1 - share) * of_forest, rtol=1e-12)


def table_of(run: Path, path: Path, out: Path, predictor: Any = None) -> tuple[np.ndarray, Any]:
    finetuned = load_finetuned(run, device="cpu")
    done = predict(finetuned, path, out, folder=out.parent, predictor=predictor, progress=SilentProgress())
    return np.array([float(row["y_predicted"]) for row in read_rows(out)]), done


@pytest.mark.parametrize("predictor", OF_FORESTS)
def test_predictions_are_means_over_seeds_and_splits_of_what_training_wrote(run, table, tmp_path, predictor):
    """Each row of the table is a test row of one split at most, so each split's own test rows are compared."""
    found, summary = table_of(run, table, tmp_path / "out.csv", predictor)
    results = read_results(run)
    assert summary.predictor == predictor
    assert any("means over 2 splits of the rows, 2 seeds each" in note for note in summary.notes)
    of_first = load_finetuned(run, device="cpu")
    by_split = []
    for of_split in results.of_splits:
        alone = load_finetuned(run, device="cpu")
        runners = alone.runners if of_split.split_seeds[0] == 0 else alone.others[0]
        alone = type(alone)(
            run, alone.recipe, alone.encoder_recipe, alone.tokenizer, alone.sequence_length, of_split, runners
        )
        out = tmp_path / f"{of_split.split_seeds[0]}.csv"
        predict(alone, table, out, folder=tmp_path, predictor=predictor, progress=SilentProgress())
        values = np.array([float(row["y_predicted"]) for row in read_rows(out)])
        name = f"split-{of_split.split_seeds[0]}.json"
        path = run / "split.json" if of_split.split_seeds[0] == 0 else run / "splits" / name
        rows = json.loads(path.read_text())["indices"]["test"]
        baseline = {"model": None, "forest": of_split.predictors.baselines[0], "both": BOTH}[predictor]
        written = read_seed_outputs(run, of_split, "test", rows, baseline=baseline).mean(axis=0)[:, 0]
        np.testing.assert_allclose(values[rows], written, atol=1e-6)
        by_split.append(values)
    np.testing.assert_allclose(found, np.mean(by_split, axis=0), atol=1e-6)
    assert len(of_first.others) == 1
    in_memory = load(run, device="cpu").predict([row[0] for row in _smiles(table)], predictor=predictor)
    np.testing.assert_allclose(in_memory.y_predicted, found, atol=1e-9)


def _smiles(table: Path) -> list[list[str]]:
    return [[row["smiles"]] for row in read_rows(table)]


def test_the_best_predicts_unless_another_is_asked_for(run, table, tmp_path):
    best = read_results(run).predictors.best
    by_default, summary = table_of(run, table, tmp_path / "a.csv")
    assert summary.predictor == best
    assert any(note.startswith("predicted with") and "best on the validation rows" in note for note in summary.notes)
    assert by_default.tolist() == table_of(run, table, tmp_path / "b.csv", best)[0].tolist()


def test_each_predictor_has_a_calibration_over_the_validation_rows_of_all_splits(run):
    results = read_results(run)
    for predictor in OF_FORESTS:
        (output,) = read_calibration(run, predictor).outputs
        assert isinstance(output, ConformalResiduals)
        assert len(output.residuals) == 2 * results.split_sizes["valid"]


def test_the_spread_of_several_splits_is_the_mean_of_theirs():
    found = error_signs(np.array([[[1.0]], [[3.0]], [[7.0]], [[7.0]]]), None, 2)
    assert found.spread.tolist() == [[math.sqrt(2) / 2]]


def test_rows_of_any_split_are_known(run, table, tmp_path):
    table_of(run, table, tmp_path / "out.csv", "model")
    parts = [json.loads(path.read_text())["indices"] for path in (run / "split.json", run / "splits/split-1.json")]
    known = {SMILES[row % len(SMILES)] for part in parts for row in part["train"]}
    for row in read_rows(tmp_path / "out.csv"):
        assert (row["in_split"] == "train") == (row["smiles"] in known)


def test_a_resumed_run_grows_what_it_needs_and_nothing_else(run, tmp_path, monkeypatch):
    again = shutil.copytree(run, tmp_path / "again")
    grown = sorted(again.rglob("forests.npz"))
    before = grown[0].read_bytes()
    grown[0].unlink()
    (again / "results.json").unlink()
    monkeypatch.setattr(
        "exlm_cli.finetune.baselines.baseline.grow_forests.__kwdefaults__", {"num_trees": 8, "num_threads": 1}
    )
    progress = Recorder()
    resume_finetuning(again, progress=progress)
    assert grown[0].read_bytes() == before
    assert len([bar for bar in progress.bars if "random forest" in bar.label]) == 1
    assert (again / "results.json").read_bytes() == (run / "results.json").read_bytes()


def test_labels_are_predicted_by_both_as_probabilities(table, smiles_model, few_trees, tmp_path):
    made = make(table, smiles_model, tmp_path / "run", label="z", seeds=[1])
    finetuned = load_finetuned(made, device="cpu")
    out = tmp_path / "out.csv"
    predict(finetuned, table, out, folder=tmp_path, predictor="both", progress=SilentProgress())
    (share,) = finetuned.results.predictors.shares
    parts = {}
    for predictor in OF_FORESTS:
        predict(finetuned, table, out, folder=tmp_path, predictor=predictor, progress=SilentProgress())
        parts[predictor] = np.array([float(row["z_probability"]) for row in read_rows(out)])
    np.testing.assert_allclose(parts["both"], share * parts["model"] + (1 - share) * parts["forest"], atol=1e-9)


def test_a_run_without_forests_has_the_model_alone(molecules, tmp_path):
    table = write_rows(tmp_path / "new.csv", ["mol"], [["CCO"]])
    finetuned = load_finetuned(molecules, device="cpu")
    done = predict(finetuned, table, tmp_path / "out.csv", folder=tmp_path, progress=SilentProgress())
    assert done.predictor == "model"
    for name, finding in (
        ("both", "has no baseline, which `predictor=both` needs"),
        ("all", "`predictor=all`: accept"),
    ):
        with pytest.raises(ConfigError, match=re.escape(finding)):
            predict(finetuned, table, tmp_path / "b.csv", folder=tmp_path, predictor=name, progress=SilentProgress())  # type: ignore[arg-type]
    assert not (tmp_path / "b.csv").exists()


def test_forests_that_are_damaged_are_refused(run, table, tmp_path):
    again = shutil.copytree(run, tmp_path / "again")
    path = next(again.rglob("forests.npz"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: not readable as forests")):
        table_of(again, table, tmp_path / "out.csv", "forest")
