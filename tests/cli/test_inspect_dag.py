"""`exlm inspect-dag` on small checkpoints: what it prints, writes and takes an input for."""

import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from exlm_cli.cli.masked import kind_of, kind_of_file
from tests.cli.asserts import printed_by, result_of
from tests.unit.finetune.synthetic import make_pretrained

SENTENCE = "This is [MASK], and I'm very [MASK] to see this."
MOLECULE = "CC[MASK]c1ccccc1"


def test_a_newest_run_is_described_in_eighty_columns_with_files_in_its_report(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    make_pretrained(folder / "runs/text")
    captured = printed_by(capsys, ["inspect-dag", SENTENCE])
    assert "checkpoint: runs/text, the newest text run" in captured.err
    lines = captured.out.splitlines()
    assert lines[0] == "This is [MASK 1], and I'm very [MASK 2] to see this."
    assert max(cell_len(line) for line in lines if not line.startswith("wrote ")) <= 80
    assert "\x1b" not in captured.out
    assert sum(bool(re.match(r" 1 +\d +\d\.\d\d ", line)) for line in lines) == 3, "three states of the first mask"
    written = [Path(line.removeprefix("wrote ")) for line in lines[-6:]]
    assert {path.parent.parent for path in written} == {Path("runs/text/report")}
    assert all(path.is_file() for path in written)


def test_json_is_all_that_stdout_has(run_folder, capsys):
    words = ["inspect-dag", SENTENCE, "--checkpoint", "T", "--top", "2", "--n-best", "4", "--format", "json"]
    result = result_of(capsys, *words, "--out", "out")
    assert result.pop("files") == ["out/dag.json"]
    assert result == json.loads((run_folder / "out" / "dag.json").read_text(encoding="utf-8"))
    assert (result["num_masks"], len(result["fillings"])) == (2, 4)
    assert all(len(node["tokens"]) == 2 for node in result["nodes"][1:-1])
    assert Path(result["checkpoint"]).name == "step-3"


def test_a_molecule_of_any_length_is_judged_by_rdkit_and_no_files_can_be_asked_for(run_folder, capsys):
    words = ["inspect-dag", MOLECULE, "--checkpoint", "P", "--length", "any", "--format", "none"]
    out = printed_by(capsys, words).out
    assert "RDKit" in out
    assert "share of all fillings of any length" in out
    assert "wrote" not in out


def test_a_step_can_be_named_and_the_same_sentence_gets_the_same_folder(folder, capsys):
    step = make_pretrained(folder / "run", objective="mlm") / "checkpoints/step-3"
    folders = []
    for sentence in (SENTENCE, SENTENCE, SENTENCE.replace("very", "so")):
        result = result_of(capsys, "inspect-dag", sentence, "--checkpoint", step)
        assert {Path(file).name for file in result["files"]} == {"dag.html", "dag.json"}, "an MLM has no DAG to draw"
        folders.append(Path(result["files"][0]).parent)
    assert folders[0] == folders[1] != folders[2]
    assert folders[0].parent == folder / "run/report"


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("text", [SENTENCE, "[MASK] [MASK].", "Hello[MASK]"]),
        ("smiles", [MOLECULE, "[nH][MASK]"]),
        (None, ["so[MASK]", "[MASK].[MASK]"]),
    ],
)
def test_the_kind_of_an_input_is_told_by_its_tokens(kind, inputs):
    """That `--kind` and `--checkpoint` decide where it could be either is in golden/inspect-dag.txt."""
    assert {kind_of(text) for text in inputs} == {kind}


def test_the_kind_of_a_file_of_inputs_is_told_by_its_column_its_name_or_its_header(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("id,Canonical_SMILES\n1,C[MASK]\n")
    for name, kind in (("a.txt", "text"), ("a.smi", "smiles"), ("a.csv", "smiles")):
        assert kind_of_file(tmp_path / name, None, None, smiles=None, text=None) == kind
    assert kind_of_file(table, None, None, smiles=None, text="id") == "text"
    assert kind_of_file(tmp_path / "a.txt", None, None, smiles="a", text=None) == "smiles"
    assert kind_of_file(tmp_path / "a.txt", tmp_path, None, smiles=None, text=None) is None, "the checkpoint decides"
