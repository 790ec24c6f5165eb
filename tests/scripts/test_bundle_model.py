"""`studies/bundle_model.py`: a run becomes a model of the package, with its card; and the models that are there."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import bundle_model
import exlm_cli
from exlm_cli import bundled_models
from exlm_cli.errors import ExlmError
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_run_json, update_run_json
from exlm_cli.train.checkpoint import checkpoint_paths
from exlm_cli.train.pretrained import load_pretrained
from tests.unit.finetune.synthetic import make_pretrained

ROOT = Path(__file__).parents[2]
PACKAGE = Path(exlm_cli.__file__).parent / "pretrained"


ABOUT = bundle_model.About.model_validate(yaml.safe_load((ROOT / "studies/bundled/text.yaml").read_text("utf-8")))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_pretrained(tmp_path / "run", data={"train": ["/home/me/wiki.txt"]})
    update_run_json(run, {"device": "a GPU", "precision": "bf16", "train_time_s": 5400.0, "seed": 7})
    (tmp_path / "valid.txt").write_text("amber birch cedar daisy\n" * 20)
    return run


def test_a_run_becomes_a_model_of_the_package(run, tmp_path, monkeypatch):
    # what only run.json says
    about = ABOUT.model_copy(update={"hardware": None, "hours": None, "commit": None})
    folder = tmp_path / "pretrained"
    given = {"valid": [str(tmp_path / "valid.txt")], "max_sequences": None, "progress": SilentProgress()}
    for _ in range(2):  # the second replaces the first
        assert bundle_model.bundle(run, about, folder=folder, **given) == folder / "text"
    assert [path.name for path in folder.iterdir()] == ["text"]
    card = (folder / "text/README.md").read_text(encoding="utf-8")
    for said in (about.title, about.trained_on, "| hours | 1.50 |", "| hardware | a GPU |", "| seed | 7 |"):
        assert said in card
    described = read_run_json(folder / "text")
    assert (described.trained_on, described.git_commit) == (about.trained_on, read_run_json(run).git_commit)
    monkeypatch.setattr(bundled_models, "FOLDER", folder)
    assert load_pretrained(Path("bundled:text"), device="cpu").sha256 in card
    assert not [path for path in folder.rglob("*.*") if path.is_file() and b"/home/me" in path.read_bytes()]


def test_figures_that_were_measured_where_it_was_trained_go_onto_the_card(run, tmp_path):
    """The weights that come back from there are rounded already."""
    given = {"valid": [], "max_sequences": None, "folder": tmp_path / "pretrained", "progress": SilentProgress()}
    with pytest.raises(ExlmError, match="no figures of the weights before rounding"):
        bundle_model.bundle(run, ABOUT, **given)
    figures = {"trained": {"loss": 2.25, "mask_accuracy": 0.5}, "float16": {"loss": 2.2504, "mask_accuracy": 0.5}}
    (run / bundle_model.ROUNDING_FILE).write_text(json.dumps({"step": 3, **figures}))
    card = (bundle_model.bundle(run, ABOUT, **given) / "README.md").read_text(encoding="utf-8")
    assert "| loss, nats a target | 2.2500 | 2.2504 |" in card
    (run / bundle_model.ROUNDING_FILE).write_text(json.dumps({**figures, "float16": {"loss": 2.3}}))
    with pytest.raises(ExlmError, match=r"rounding to float16 costs 0\.0500 nats"):
        bundle_model.bundle(run, ABOUT, **given)


def test_the_models_of_the_package_are_small_and_whole(monkeypatch):
    """Weights in float16 alone, at most 26 MB together, each with its card; none is there before they are trained."""
    monkeypatch.setattr(bundled_models, "FOLDER", PACKAGE)
    runs = bundled_models.bundled_runs()
    assert sum(map(bundle_model.size_of, runs)) <= bundle_model.MAX_BYTES
    for run in runs:
        loaded = load_pretrained(Path(f"bundled:{run.name}"), device="cpu")
        assert loaded.recipe.data.kind == run.name
        assert read_run_json(run).trained_on
        (checkpoint,) = checkpoint_paths(run)
        assert {tensor.dtype for tensor in load_file(checkpoint / "model.safetensors").values()} == {torch.float16}
        assert not list(run.rglob("optimizer*"))
        card = (run / "README.md").read_text(encoding="utf-8")
        assert loaded.sha256 in card
        assert not any("/" in name for name in (*loaded.recipe.data.train, *loaded.recipe.data.valid))
        assert '"/' not in (run / "run.json").read_text("utf-8") + (checkpoint / "state.json").read_text("utf-8")
