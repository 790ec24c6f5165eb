"""`exlm inspect-dag` on small checkpoints: what it prints, writes, chooses and refuses."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.cli.asserts import printed_by, result_of
from tests.unit.finetune.finetuned_runs import smiles_pretrained
from tests.unit.finetune.synthetic import make_pretrained

SENTENCE = "This is [MASK], and I'm very [MASK] to see this."


@pytest.fixture(scope="module")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs: a text MLM, a SMILES ExLM, and a text ExLM with four states for each mask."""
    runs = tmp_path_factory.mktemp("made") / "runs"
    make_pretrained(runs / "text-mlm", objective="mlm")
    smiles_pretrained(runs / "smiles")
    make_pretrained(runs / "text", masking={"num_states_per_mask": 4})
    return runs


@pytest.fixture
def work(made_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current directory of this test's own with the runs in it."""
    shutil.copytree(made_runs, tmp_path / "runs", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_the_newest_text_run_is_taken_and_named(work, capsys):
    """Damaged runs and those of other commands are passed over."""
    for name, content in {"old": None, "damaged": "{", "foreign": '{"command": "finetune"}'}.items():
        shutil.copytree("runs/text", f"runs/{name}")
        if content is not None:
            (work / "runs" / name / "run.json").write_text(content)
    os.utime("runs/old/run.json", (1, 1))
    captured = printed_by(capsys, ["inspect-dag", SENTENCE])
    assert "checkpoint: runs/text, the newest text run" in captured.err
    lines = captured.out.splitlines()
    assert lines[0] == "This is [MASK 1], and I'm very [MASK 2] to see this."
    assert max(cell_len(line) for line in lines if not line.startswith("wrote ")) <= 80
    assert "\x1b" not in captured.out
    assert sum(bool(re.match(r" 1 +\d +\d\.\d\d ", line)) for line in lines) == 4, "four states of the first mask"
    written = [Path(line.removeprefix("wrote ")) for line in lines[-6:]]
    assert {path.parent.parent for path in written} == {Path("runs/text/report")}
    assert all(path.is_file() for path in written)


def test_json_is_all_that_stdout_has(work, capsys):
    words = ["inspect-dag", SENTENCE, "--top", "2", "--n-best", "4", "--format", "html,json", "--out", "out"]
    result = result_of(capsys, *words)
    assert result["files"] == ["out/dag.html", "out/dag.json"]
    assert result.pop("files")
    assert result == json.loads((work / "out" / "dag.json").read_text(encoding="utf-8"))
    assert result["num_masks"] == 2
    assert len(result["fillings"]) == 4
    assert all(len(node["tokens"]) == 2 for node in result["nodes"][1:-1])
    assert result["checkpoint"] == "runs/text/checkpoints/step-3"


def test_smiles_take_the_newest_smiles_run_and_any_length_and_no_files_can_be_asked_for(work, capsys):
    captured = printed_by(capsys, ["inspect-dag", "CC[MASK]c1ccccc1", "--length", "any", "--format", "none"])
    assert "checkpoint: runs/smiles/pretrained, the newest SMILES run" in captured.err
    assert "RDKit" in captured.out
    assert "share of all fillings of any length" in captured.out
    assert "wrote" not in captured.out
    assert list(work.rglob("dag-*")) == []


def test_an_mlm_has_guesses_but_no_dag(work, capsys):
    captured = printed_by(capsys, ["inspect-dag", SENTENCE, "--checkpoint", "runs/text-mlm", "--out", "out"])
    assert "no DAG to draw" in captured.out
    assert sorted(path.name for path in (work / "out").iterdir()) == ["dag.html", "dag.json"]


def test_a_step_can_be_named_and_the_same_sentence_gets_the_same_folder(work, capsys):
    step = "runs/text/checkpoints/step-3"
    folders = []
    for sentence in (SENTENCE, SENTENCE, SENTENCE.replace("very", "so")):
        result = result_of(capsys, "inspect-dag", sentence, "--checkpoint", step, "--format", "json")
        folders.append(Path(result["files"][0]).parent)
    assert folders[0] == folders[1] != folders[2]
    assert folders[0].parent == Path("runs/text/report")
