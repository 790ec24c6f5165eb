"""Models of the package, `bundled:NAME`, as commands read and record them: tiny ones, made by the tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import exlm_cli
from exlm_cli import bundled_models
from exlm_cli.errors import CheckpointError
from exlm_cli.export.hub import copy_run
from exlm_cli.export.source import pretrained_source
from exlm_cli.files import write_json
from exlm_cli.finetune.run import resume_finetuning
from exlm_cli.run_dir import RUN_FILE, read_run_json
from exlm_cli.train.checkpoint import MODEL_FILE, read_manifest
from exlm_cli.train.pretrained import load_pretrained
from tests.cli.asserts import printed_by, refusal_of, result_of

SENTENCE = "This is [MASK], and I'm very [MASK] to see this."
ONE_EPOCH = ("--seed", "1", "--set", "train.max_epochs=1", "--set", "train.num_threads=1", "--no-baseline")


@pytest.fixture(scope="module")
def built(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a text and a SMILES model as the package has them."""
    folder = tmp_path_factory.mktemp("package") / "pretrained"
    for name, run in (("text", made / "text"), ("smiles", made / "smiles/pretrained")):
        copy_run(pretrained_source(load_pretrained(run, device="cpu")), folder / name, torch.float16)
        described = {"trained_on": f"some rows of {name}", "parameters": 4_700_000}
        write_json(folder / name / RUN_FILE, read_run_json(folder / name).model_copy(update=described))
    return folder


@pytest.fixture
def package(built: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return that folder; the current directory is another one, and nothing changes in the package."""
    monkeypatch.setattr(bundled_models, "FOLDER", built)
    before = {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}
    yield built
    assert {path: path.read_bytes() for path in built.rglob("*") if path.is_file()} == before


def test_weights_are_those_of_the_run_in_float16(package, made):
    """Read as float32: exactly the rounded values."""
    loaded = load_pretrained(Path("bundled:text"), device="cpu")
    ours, theirs = load_pretrained(made / "text", device="cpu").model.state_dict(), loaded.model.state_dict()
    assert {tensor.dtype for tensor in load_file(loaded.checkpoint / MODEL_FILE).values()} == {torch.float16}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], ours[name].half().float()) for name in ours)
    assert loaded.sha256 == read_manifest(loaded.checkpoint).files[MODEL_FILE].sha256


def test_a_weight_that_float16_cannot_hold_is_refused(made, tmp_path):
    shutil.copytree(made / "text", tmp_path / "run")
    pretrained = load_pretrained(tmp_path / "run", device="cpu")
    weights = load_file(pretrained.checkpoint / MODEL_FILE)
    name = min(weights)
    weights[name].view(-1)[0] = 1e5
    save_file(weights, pretrained.checkpoint / MODEL_FILE)
    with pytest.raises(CheckpointError, match=rf"`{name}` holds values that torch.float16 cannot"):
        copy_run(pretrained_source(pretrained), tmp_path / "copy", torch.float16)


def test_a_name_is_read_like_the_folder_and_reports_go_to_runs(package, capsys, folder):
    (folder / "words.txt").write_text("amber birch cedar\n" * 40)
    shutil.copytree(package / "text", folder / "copy")
    loaded = exlm_cli.load("bundled:text", device="cpu").fill(SENTENCE)
    assert loaded.checkpoint == "bundled:text"
    assert loaded.n_best == exlm_cli.load("copy", device="cpu").fill(SENTENCE).n_best
    result = result_of(capsys, "eval", "bundled:text", "copy", "--data", "words.txt", "--format", "csv")
    assert [run["name"] for run in result["runs"]] == ["bundled:text", "copy"]
    assert result["runs"][0]["metrics"] == result["runs"][1]["metrics"]
    assert {Path(file).parent for file in result["files"]} == {Path("runs/bundled-text/report")}


def test_a_fine_tuned_run_records_the_name_and_the_hash(package, capsys, folder, monkeypatch, tmp_path):
    """So it is continued and used after the package has moved, as in another installation."""
    (folder / "words.csv").write_text("text,amber\n" + "amber birch,1\ncedar daisy,0\n" * 20)
    words = ("finetune", "csv", "words.csv", "--text-column", "text", "--label-columns", "amber", *ONE_EPOCH)
    said = printed_by(capsys, [*words, "--device", "cpu", "--out", "tuned"]).err
    assert "checkpoint: bundled:text, which the package brings, 4.7 M parameters, trained on some rows of text" in said
    described = read_run_json(folder / "tuned")
    assert described.checkpoint == "bundled:text"
    assert described.checkpoint_sha256 == load_pretrained(Path("bundled:text"), device="cpu").sha256
    assert str(package).encode() not in b"".join(path.read_bytes() for path in (folder / "tuned").rglob("*.json"))
    monkeypatch.setattr(bundled_models, "FOLDER", Path(shutil.copytree(package, tmp_path / "elsewhere")))
    assert resume_finetuning(folder / "tuned", ["seeds=[1,2]"]).results.seeds == (1, 2)
    monkeypatch.setattr(bundled_models, "FOLDER", tmp_path / "none")
    with pytest.raises(CheckpointError, match="`bundled:text`"):
        resume_finetuning(folder / "tuned", ["seeds=[1,2,3]"])
    assert exlm_cli.load(folder / "tuned", device="cpu").predict(["amber"]).filter(like="_probability").shape == (1, 1)


def test_what_a_bundled_model_cannot_do_is_refused_by_its_name(package, capsys):
    assert "it brings `bundled:smiles`, `bundled:text`" in refusal_of(
        capsys, "inspect-dag", SENTENCE, "--checkpoint", "bundled:txt"
    )
    error = refusal_of(capsys, "eval", "bundled:text")
    assert "bundled:text" in error
    assert "`--data FILE`" in error
    assert str(package) not in error
