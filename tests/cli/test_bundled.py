"""Models of the package, `bundled:NAME`, in every command that reads a checkpoint: tiny ones, made by the tests."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import exlm_cli
from exlm_cli import bundled_models
from exlm_cli.config.load import resumed_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import CheckpointError
from exlm_cli.export.folder import Comparison
from exlm_cli.export.hub import copy_run
from exlm_cli.export.source import pretrained_source
from exlm_cli.files import write_json
from exlm_cli.finetune.run import resume_finetuning
from exlm_cli.run_dir import RUN_FILE, read_run_json, update_run_json
from exlm_cli.train.checkpoint import MODEL_FILE, read_manifest
from exlm_cli.train.pretrained import load_pretrained
from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.unit.finetune.synthetic import make_pretrained

SENTENCE = "This is [MASK], and I'm very [MASK] to see this."
MOLECULE = "CC[MASK]c1cc[MASK]cc1"
INSPECT = ("inspect-dag", SENTENCE, "--format", "none")
ONE_EPOCH = ("--seed", "1", "--set", "train.max_epochs=1", "--set", "train.num_threads=1", "--device", "cpu")


@pytest.fixture(scope="module")
def built(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a text and a SMILES model as the package has them."""
    folder = tmp_path_factory.mktemp("package") / "pretrained"
    for name, run in (("text", made / "text"), ("smiles", made / "smiles/pretrained")):
        copy_run(pretrained_source(load_pretrained(run, device="cpu")), folder / name, torch.float16)
        described = {"trained_on": f"some rows of {name}", "parameters": 12_345}
        write_json(folder / name / RUN_FILE, read_run_json(folder / name).model_copy(update=described))
    return folder


@pytest.fixture
def package(built: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return that folder; the current directory is another one, and nothing may change in the package."""
    monkeypatch.setattr(bundled_models, "FOLDER", built)
    return built


@pytest.fixture(autouse=True)
def _unchanged(package: Path) -> object:
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before


def test_weights_are_those_of_the_run_in_float16(package, made):
    """Read as float32: exactly the rounded values."""
    loaded = load_pretrained(Path("bundled:text"), device="cpu")
    ours, theirs = load_pretrained(made / "text", device="cpu").model.state_dict(), loaded.model.state_dict()
    saved = load_file(loaded.checkpoint / "model.safetensors")
    assert ours.keys() == theirs.keys() == saved.keys()
    assert {tensor.dtype for tensor in saved.values()} == {torch.float16}
    assert all(torch.equal(theirs[name], ours[name].half().float()) for name in ours)
    assert not list(package.rglob("optimizer*"))
    assert loaded.name == "bundled:text"
    assert loaded.sha256 == read_manifest(loaded.checkpoint).files[MODEL_FILE].sha256


def test_a_weight_that_float16_cannot_hold_is_refused(made, tmp_path):
    shutil.copytree(made / "text", tmp_path / "run")
    pretrained = load_pretrained(tmp_path / "run", device="cpu")
    weights = load_file(pretrained.checkpoint / "model.safetensors")
    name = min(weights)
    weights[name].view(-1)[0] = 1e5
    save_file(weights, pretrained.checkpoint / "model.safetensors")
    source = pretrained_source(pretrained)
    with pytest.raises(CheckpointError, match=rf"`{name}` holds values that torch.float16 cannot"):
        copy_run(source, tmp_path / "copy", torch.float16)


def test_without_a_run_the_bundled_model_answers_and_is_named(package, capsys, folder):
    said = printed_by(capsys, ["inspect-dag", SENTENCE])
    assert said.err.startswith("checkpoint: bundled:text, ")
    assert "trained on some rows of text" in said.err
    assert "wrote runs/bundled-text/report/" in said.out
    said = printed_by(capsys, ["inspect-dag", MOLECULE, "--format", "none"])
    assert "checkpoint: bundled:smiles, " in said.err
    assert "finishes the run" not in said.err


def test_a_finished_run_goes_before_the_bundled_model_and_that_before_an_unfinished_one(package, capsys, folder):
    make_pretrained(folder / "runs/mine")
    assert "checkpoint: bundled:text, " in printed_by(capsys, INSPECT).err
    update_run_json(folder / "runs/mine", {"steps": 3, "parameters": 2_000_000})
    assert printed_by(capsys, INSPECT).err.startswith("checkpoint: runs/mine, ")


def test_a_name_is_a_run_for_every_reader(package, made, capsys, folder, monkeypatch):
    """The same vectors, DAG and exported files for the name as for the folder."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("exlm_cli.export.folder.compare_outputs", lambda *_: Comparison(1, 0.0, 1.0))
    (folder / "words.csv").write_text("text\namber birch\ncedar daisy\n")
    (folder / "words.txt").write_text("amber birch cedar\n" * 40)
    shutil.copytree(package / "text", folder / "copy")
    for run, out in (("bundled:text", "named"), ("copy", "copied")):
        result_of(capsys, "embed", run, "words.csv", "--out", f"{out}.npz", "--text-column", "text")
        result_of(capsys, "export", run, "--out", f"{out}-model")
    ours, theirs = np.load("named.npz"), np.load("copied.npz")
    assert ours.files == theirs.files
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert (folder / "named-model/model.safetensors").read_bytes() == (
        folder / "copied-model/model.safetensors"
    ).read_bytes()
    loaded = exlm_cli.load("bundled:text", device="cpu").fill(SENTENCE)
    assert loaded.checkpoint == "bundled:text"
    assert loaded.n_best == exlm_cli.load("copy", device="cpu").fill(SENTENCE).n_best
    result = result_of(capsys, "eval", "bundled:text", "copy", "--data", "words.txt", "--format", "csv")
    assert [run["name"] for run in result["runs"]] == ["bundled:text", "copy"]
    assert result["runs"][0]["checkpoint"] == "bundled:text"
    assert result["runs"][0]["metrics"] == result["runs"][1]["metrics"]
    assert {Path(file).parent for file in result["files"]} == {Path("runs/bundled-text/report")}


def test_a_fine_tuned_run_records_the_name_and_the_hash(package, capsys, folder, monkeypatch, tmp_path):
    """So it is continued and used after the package has moved, as in another installation."""
    (folder / "words.csv").write_text("text,amber\n" + "amber birch,1\ncedar daisy,0\n" * 20)
    words = ("finetune", "csv", "words.csv", "--text-column", "text", "--label-columns", "amber", *ONE_EPOCH)
    result_of(capsys, *words, "--out", "tuned")
    described = read_run_json(folder / "tuned")
    assert described.checkpoint == "bundled:text"
    assert described.checkpoint_sha256 == load_pretrained(Path("bundled:text"), device="cpu").sha256
    assert str(package).encode() not in b"".join(path.read_bytes() for path in (folder / "tuned").rglob("*.json"))
    shutil.copytree(package, tmp_path / "elsewhere")
    monkeypatch.setattr(bundled_models, "FOLDER", tmp_path / "elsewhere")
    resumed = resume_finetuning(folder / "tuned", ["seeds=[1,2]"])
    assert resumed.results.seeds == (1, 2)
    monkeypatch.setattr(bundled_models, "FOLDER", tmp_path / "none")
    with pytest.raises(CheckpointError, match="`bundled:text`"):
        resume_finetuning(folder / "tuned", ["seeds=[1,2,3]"])
    assert exlm_cli.load(folder / "tuned", device="cpu").predict(["amber"]).filter(like="_probability").shape == (1, 1)


def test_a_bundled_model_cannot_be_continued(package, capsys):
    """Nor can its folder."""
    for command in ("pretrain", "finetune", "sweep"):
        assert "`bundled:text` cannot be continued" in refusal_of(capsys, command, "--resume", "bundled:text")
    with pytest.raises(CheckpointError, match=r"^`bundled:text` cannot be continued"):
        resumed_recipe(package / "text", PretrainRecipe)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("inspect-dag", SENTENCE, "--checkpoint", "bundled:txt"), "it brings `bundled:smiles`, `bundled:text`"),
        (("finetune", "csv", "m.csv", "--label-columns", "y", "--checkpoint", "bundled:text"), "is a model of text"),
        (("eval", "bundled:text"), "`--data FILE`"),
        (("predict", "bundled:text", "m.csv"), "predicts no labels"),
        (("inspect-dag", SENTENCE, "--kind", "smiles", "--checkpoint", "bundled:text"), "is a model of text"),
    ],
)
def test_what_a_bundled_model_cannot_do_is_refused_by_its_name(package, capsys, folder, words, said):
    (folder / "m.csv").write_text("smiles,y\nCCO,1\n")
    error = refusal_of(capsys, *words)
    assert said in error
    assert "bundled:t" in error
    assert str(package) not in error


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        (SENTENCE, "text"),
        ("[MASK] [MASK].", "text"),
        ("Hello[MASK]", "text"),
        (MOLECULE, "SMILES"),
        ("[nH][MASK]", "SMILES"),
        ("so[MASK]", None),
        ("[MASK].[MASK]", None),
    ],
)
def test_the_kind_is_told_from_the_input_or_asked_for(capsys, sentence, kind):
    words = ["inspect-dag", sentence, "--format", "none"]
    if kind is not None:
        assert f"checkpoint: bundled:{kind.lower()}, " in printed_by(capsys, words).err
        return
    assert "could be text or SMILES" in refusal_of(capsys, *words)
    for given in ("text", "smiles"):
        assert f"checkpoint: bundled:{given}, " in printed_by(capsys, [*words, "--kind", given]).err
    printed_by(capsys, [*words, "--checkpoint", "bundled:text"])
