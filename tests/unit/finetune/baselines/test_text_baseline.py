"""TF-IDF beside a model of texts: it is scored, wins where the model has learned nothing, is kept, and predicts."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.api.run import load
from exlm_cli.errors import ConfigError
from exlm_cli.export.folder import export_folder
from exlm_cli.export.source import finetuned_source
from exlm_cli.finetune.baselines import baseline as baseline_module
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.prediction.predict import predict
from exlm_cli.finetune.results import FinetunedRun, read_results
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.finetune.scores import BOTH, read_scores
from exlm_cli.progress import SilentProgress
from exlm_cli.report.finetuning.scores import results_tables
from tests.unit.finetune.finetuned_runs import read_rows, write_rows
from tests.unit.finetune.synthetic import WORDS, finetune_recipe, read_part
from tests.unit.tasks.glue_files import write_glue

TRAIN = {"max_epochs": 1, "microbatch_tokens": 2048, "num_threads": 1}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whether a text has amber."""
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(WORDS, size=4)) for _ in range(300)]
    rows = [[text, str(int("amber" in text))] for text in texts]
    return write_rows(tmp_path_factory.mktemp("table") / "words.csv", ["text", "amber"], rows)


@pytest.fixture(scope="module")
def run(table: Path, text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its model is trained so slowly that it stays as it was drawn."""
    task = {"name": "csv", "files": {"train": str(table)}, "label_columns": ["amber"], "text_column": "text"}
    recipe = finetune_recipe(task=task, train=TRAIN, optim={"lr": 1e-7})
    out = tmp_path_factory.mktemp("amber") / "run"
    return run_finetuning(recipe, checkpoint=text_model, out=out, baseline=None).run_dir


def test_it_wins_and_the_results_say_so(run):
    results, scores = read_results(run), read_scores(run)
    assert scores.others == ["tfidf", BOTH]
    assert results.predictors.best == "baseline"
    assert "It uses TF-IDF + linear model" in results.verdict[0]
    assert [interval.over for interval in results.comparison.intervals] == ["rows"]
    (shown,) = results_tables(FinetunedRun("run", run, results))
    assert any("95 % interval of roc_auc over the 30 test rows" in note for note in shown.notes)


def predicted(run: Path, table: Path, out: Path, predictor: Any, name: str) -> Any:
    finetuned = load_finetuned(run, device="cpu")
    done = predict(finetuned, table, out, folder=out.parent, predictor=predictor, progress=SilentProgress())
    return np.array([float(row[name]) for row in read_rows(out)]), done


def test_it_predicts_unless_another_is_asked_for(run, table, tmp_path):
    """The seeds share it, so that none differs."""
    found, summary = predicted(run, table, tmp_path / "a.csv", None, "amber_probability")
    assert summary.predictor == "baseline"
    assert "predicted with TF-IDF + linear model, best on the validation rows" in summary.notes
    rows, by_seed_KNC, _ = read_part(run, "test", "tfidf")
    np.testing.assert_allclose(found[rows], by_seed_KNC.mean(axis=0)[:, 0], atol=1e-9)
    assert {float(row["amber_seed_spread"]) for row in read_rows(tmp_path / "a.csv")} == {0}
    model, _ = predicted(run, table, tmp_path / "b.csv", "model", "amber_probability")
    assert np.abs(model - found).max() > 0.1


def test_a_resumed_run_does_not_train_it_again(run, tmp_path, monkeypatch):
    again = shutil.copytree(run, tmp_path / "again")
    (again / "results.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(baseline_module, "fit_tfidf", pytest.fail)
        resume_finetuning(again)
    assert (again / "results.json").read_bytes() == (run / "results.json").read_bytes()
    (again / "results.json").unlink()
    (kept,) = again.rglob("tfidf.npz")
    before = kept.read_bytes()
    kept.unlink()
    resume_finetuning(again)
    assert kept.read_bytes() == before


def test_pairs_of_a_table_are_read_by_model_and_baseline_in_a_file_and_in_memory(text_model, tmp_path):
    """A frozen encoder reads each text alone, so that its outputs do not depend on what a text is paired with."""
    rng = np.random.default_rng(3)
    pairs = [[" ".join(rng.choice(WORDS, size=3)) for _ in range(2)] for _ in range(60)]
    rows = [[a, b, str(len({*a.split()} & {*b.split()}))] for a, b in pairs]
    table = write_rows(tmp_path / "pairs.csv", ["a", "b", "shared"], rows)
    task = {"text_column": ["a", "b"], "label_columns": ["shared"], "label_kind": "regression"}
    task |= {"name": "csv", "files": {"train": str(table)}}
    recipe = finetune_recipe(seeds=[1], task=task, train=TRAIN | {"freeze_encoder": True})
    made = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run", baseline=True).run_dir
    loaded = load(made, device="cpu")
    for predictor in ("model", "baseline"):
        found, summary = predicted(made, table, tmp_path / f"{predictor}.csv", predictor, "shared_predicted")
        assert summary.metrics["rmse"] > 0
        in_memory = loaded.predict([(a, b) for a, b in pairs], predictor=predictor)
        np.testing.assert_allclose(in_memory.shared_predicted, found, atol=1e-6)
    model = loaded.model
    assert (model.pooled, model.state_width) == ("means", 4 * loaded.embed("amber").mean.shape[1])
    with pytest.raises(ConfigError, match=r"reads the mean of a text's states"):
        export_folder(finetuned_source(load_finetuned(made, device="cpu")), tmp_path / "out", SilentProgress())


def test_glue_has_it_too_by_the_tasks_own_metrics_and_predicts_rows_without_labels(text_model, tmp_path):
    """Both development sets of MNLI have each class six times; the matched rows alone have the interval."""
    write_glue(tmp_path / "data", "mnli", copies=6)
    task = {"name": "glue/mnli", "data_dir": str(tmp_path / "data"), "sequence_length": 48}
    recipe = finetune_recipe(seeds=[1], task=task, train=TRAIN)
    made = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run", baseline=None)
    scores, results = made.scores, made.results
    assert {*scores.table[scores.table.model == "tfidf"].metric} == {*scores.names("valid")} - {"loss"}
    assert "mismatched_accuracy" in scores.names("valid")
    assert (results.split_sizes["valid"], results.rows_interval.num) == (36, 18)
    new = write_rows(tmp_path / "new.csv", ["premise", "hypothesis"], [["A b.", "c"]] * 2)
    finetuned = load_finetuned(made.run_dir, device="cpu")
    done = predict(finetuned, new, None, folder=tmp_path, predictor="baseline", progress=SilentProgress())
    assert (done.predictor, done.num_rows, done.metrics) == ("baseline", 2, {})
    assert len(done.files[0].read_text().splitlines()) == 3
    in_memory = load(made.run_dir, device="cpu").predict([("A b.", "c")], predictor="baseline")
    assert in_memory.predicted_class[0] == read_rows(done.files[-1])[0]["predicted_class"]
