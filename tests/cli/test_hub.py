"""`exlm push` and `hub:OWNER/NAME`, with the real client against a Hub on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.export.folder import Comparison
from exlm_cli.export.hub import copy_run, push_run
from exlm_cli.export.source import pretrained_source
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.finetune.scores import PREDICTORS
from exlm_cli.progress import SilentProgress
from exlm_cli.train.checkpoint import load_optimizer_state
from exlm_cli.train.pretrained import load_pretrained
from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.cli.conftest import own_copy
from tests.fake_hub import TOKEN, FakeHub, running_hub
from tests.unit.finetune.finetuned_runs import SMILES, write_rows
from tests.unit.finetune.synthetic import finetune_recipe, grow_little

hub_client = pytest.importorskip("huggingface_hub")
SENTENCE = "amber [MASK] fern [MASK]"


@pytest.fixture
def hub(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(monkeypatch, run_folder.parent / "cache/hub") as running:
        yield running


@pytest.fixture
def pushed(hub: FakeHub, run_folder: Path) -> str:
    """Return the commit of a repository that holds the run `T`, without what `exlm export` writes."""
    source = pretrained_source(load_pretrained(run_folder / "T", device="cpu"))
    copy_run(source, run_folder / "copy")
    return hub.commit("me/text", files_of(run_folder / "copy"))


def files_of(run: Path) -> dict[str, bytes]:
    return {f"run/{path.relative_to(run)}": path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def everything_under(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_pushed_run_is_read_back(hub, run_folder, capsys, monkeypatch):
    """The same DAG as of the run itself, and without a network from then on. A second push replaces the first.

    `test_export.py` compares the exported model with the run.
    """
    pytest.importorskip("transformers")
    monkeypatch.setattr("exlm_cli.export.folder.compare_outputs", lambda *_: Comparison(1, 0.0, 1.0))
    own = own_copy(run_folder, "T")
    hub.commit("me/text", {"run/old.json": b"{}", "notes.txt": b"mine"})
    hub.private.add("me/text")
    for name in ("vectors.npz", "notes.json", "rows.jsonl"):
        (own / name).write_bytes(b"\xffmine")
    result = result_of(capsys, "push", "T", "me/text", "--private", "--license", "mit")
    assert result["url"] == f"{hub.url}/me/text"
    commit, files = hub.repos["me/text"][-1]
    assert result["commit"] == commit
    assert "run/old.json" not in files
    assert {"notes.txt", "README.md", "model.safetensors", "1_Pooling/config.json", "run/run.json"} <= files.keys()
    assert not [name for name in files if "optimizer" in name]
    assert b"mine" not in b"".join(data for name, data in files.items() if name.startswith("run/"))
    assert b"license: mit" in files["README.md"]
    assert b"hub:me/text" in files["README.md"]
    options = ("inspect-dag", SENTENCE, "--format", "none", "--checkpoint")
    ours = result_of(capsys, *options, "T")
    theirs = result_of(capsys, *options, "hub:me/text")
    assert {**theirs, "checkpoint": ""} == {**ours, "checkpoint": ""}
    hub.refuses = (500, "down")
    assert result_of(capsys, *options, f"hub:me/text@{commit}") == theirs
    assert TOKEN.encode() not in b"".join(files.values()) + everything_under(run_folder.parent)


def test_a_pushed_run_with_baselines_on_several_splits_predicts_as_the_local_one(hub, run_folder, capsys, monkeypatch):
    """The same bytes of each predictor and by default, of all seeds on all splits. No row and no path is uploaded."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("exlm_cli.export.folder.compare_outputs", lambda *_: Comparison(1, 0.0, 1.0))
    grow_little(monkeypatch)
    rows = [[text, f"{len(text) + 0.3 * (i % 5)}"] for i, text in enumerate(SMILES * 6)]
    table = write_rows(run_folder / "table.csv", ["smiles", "y"], rows)
    task = {"name": "csv", "files": {"train": str(table)}, "label_columns": ["y"], "split": "random"}
    train = {"max_epochs": 1, "microbatch_tokens": 2048, "num_threads": 1}
    recipe = finetune_recipe(seeds=[1, 2], num_replicates=2, task=task, train=train)
    run_finetuning(recipe, checkpoint=run_folder / "P", out=run_folder / "mine", baseline=True)
    result_of(capsys, "push", "mine", "me/assay")
    for options in ([], *(["--with", name] for name in PREDICTORS)):
        ours, theirs = (
            result_of(capsys, "predict", run, "table.csv", "--out", out, *options)
            for run, out in (("mine", "ours.csv"), ("hub:me/assay", "theirs.csv"))
        )
        assert theirs["metrics"] == ours["metrics"]
        assert (run_folder / "theirs.csv").read_bytes() == (run_folder / "ours.csv").read_bytes()
    pushed = hub.repos["me/assay"][-1][1]
    assert {"run/split.json", "run/splits/split-1.json"} <= pushed.keys()
    assert not [name for name in pushed if name.endswith((".csv", ".parquet")) and name != "run/scores.csv"]
    assert sum(name.endswith("safetensors") for name in pushed) == 5  # two seeds on two splits, and the export
    of_machine = str(run_folder).encode()
    assert of_machine in everything_under(run_folder / "mine")
    assert of_machine not in b"".join(pushed.values())
    said = printed_by(capsys, ["eval", "hub:me/assay"])
    assert "no figures, because `exlm push` does not upload the predictions" in said.err
    assert "rmse" in said.out
    (run_folder / "new").mkdir()
    for name in ("run/training_rows.npz", "run/calibration.json"):
        commit = hub.commit("me/assay", {path: data for path, data in pushed.items() if path != name})
        words = ["predict", "hub:me/assay", "table.csv", "--with", "model", "--out", "new/rows.csv"]
        assert f"/snapshots/{commit}/{name}: " in refusal_of(capsys, *words)
    assert not list((run_folder / "new").iterdir())


def test_a_pushed_run_cannot_be_continued(pushed, run_folder):
    checkpoint = next((run_folder / "copy/checkpoints").iterdir())
    with pytest.raises(CheckpointError, match="no state of the optimizer, which `exlm push` leaves out"):
        load_optimizer_state(checkpoint, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "change", "said"),
    [
        ("hub:me/absent", None, "the Hub has no such model, or does not show it to you"),
        ("hub:me/text@v9", None, "there is no revision `v9`"),
        ("hub:me/text", "other", "no run of exlm"),
        ("hub:me/text", "bytes", "none of its checkpoints is intact"),
        ("hub:me/text", "escape", "`hub:me/text` cannot be read from or written to the Hub: "),
        ("hub:me/text", "cut", "`hub:me/text` cannot be read from or written to the Hub: "),
        ("hub:me/text", "storage", "written to the Hub: Data processing error: CAS service error"),
        ("hub:me/text", "gated", "`hub:me/text`: access is restricted"),
    ],
)
def test_what_cannot_be_read_is_refused(hub, pushed, run_folder, monkeypatch, capsys, given, change, said):
    files = dict(hub.repos["me/text"][-1][1])
    match change:
        case "other":
            hub.commit("me/text", {"model.safetensors": b"", "README.md": b""})
        case "bytes":
            name = next(name for name in files if name.endswith("model.safetensors"))
            hub.commit("me/text", files | {name: files[name][:-1] + b"\0"})
        case "escape":
            hub.commit("me/text", files | {"run/../../../escaped.json": b"{}"})
        case "cut":
            hub.cut = 100
        case "storage":  # as hf_xet, which reads large files, says it
            broken = RuntimeError("Data processing error: CAS service error")
            monkeypatch.setattr(hub_client, "snapshot_download", Mock(side_effect=broken))
        case "gated":
            hub.refuses = (403, "ask first", "GatedRepo")
    error = refusal_of(capsys, "inspect-dag", SENTENCE, "--checkpoint", given)
    assert said in error
    assert not list(run_folder.parent.rglob("*escaped*"))


def test_a_licence_that_the_hub_does_not_know_is_said_to_be_refused(hub, capsys, monkeypatch):
    """The Hub reads the model card before anything is uploaded; its client raises a ValueError."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("exlm_cli.export.folder.compare_outputs", lambda *_: Comparison(1, 0.0, 1.0))
    error = refusal_of(capsys, "push", "T", "me/text", "--license", "Apache-2.0")
    assert "`me/text`: the Hub refuses the model card: " in error
    assert '"license" must be one of [apache-2.0, mit]' in error
    assert "run/run.json" not in hub.repos["me/text"][-1][1]


def test_a_private_run_goes_to_a_new_repository_or_a_private_one(hub, run_folder, monkeypatch):
    monkeypatch.setattr("exlm_cli.export.hub.export_folder", lambda source, out, *_, **__: out.mkdir())
    source = pretrained_source(load_pretrained(run_folder / "T", device="cpu"))
    hub.commit("me/public", {"README.md": b""})
    with pytest.raises(CheckpointError, match=r"^me/public exists and is public; nothing was uploaded$"):
        push_run(source, "me/public", SilentProgress(), is_private=True, licence=None)
    assert len(hub.repos["me/public"]) == 1
    for _ in range(2):
        pushed = push_run(source, "me/new", SilentProgress(), is_private=True, licence=None)
        assert hub.repos["me/new"][-1][0] == pushed.commit
    assert hub.private == {"me/new"}


def test_a_push_that_is_refused_is_one_line_without_the_token(hub, run_folder, capsys, monkeypatch):
    monkeypatch.setattr("exlm_cli.export.hub.export_folder", lambda source, out, *_, **__: out.mkdir())
    source = pretrained_source(load_pretrained(run_folder / "T", device="cpu"))
    hub.refuses = (403, f"you may not, {TOKEN}")
    with pytest.raises(CheckpointError) as refused:
        push_run(source, "me/text", SilentProgress(), is_private=False, licence=None)
    assert refused.value.message == "`me/text`: the Hub refuses: you may not, ***"
    assert "`me/my--model` is not a name on the Hub: " in refusal_of(capsys, "push", "T", "me/my--model")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(hub_client.constants, "HF_TOKEN_PATH", os.devnull)
    assert "needs a token of the Hub, and there is none" in refusal_of(capsys, "push", "T", "me/text")
