"""Several processes give what one gives, in order, and a row that ends its process gets that as its reason."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import loky
import pytest

from exlm_cli.data import rdkit_processes
from exlm_cli.data.molecules import find_invalid_smiles
from exlm_cli.data.rdkit_processes import _answer, map_in_order
from exlm_cli.data.rows.records import Row
from exlm_cli.data.spellings import read_smiles


def _rows(count: int) -> list[Row]:
    texts = ["CCO", "c1cccc1", "", "Cl", "Xe?"]
    return [Row("a.smi", n, texts[n % 5], problem="broken" if n % 7 == 0 else None) for n in range(1, count + 1)]


def _expected(rows: list[Row]) -> list[Row]:
    return [row._replace(problem=row.problem or find_invalid_smiles(row.text)) for row in rows]


@pytest.fixture(autouse=True)
def _small_chunks_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdkit_processes, "_CHUNK_ROWS", 8)
    monkeypatch.setattr(loky, "cpu_count", lambda: 2)


def test_two_processes_give_the_same_answers_in_the_same_order():
    rows = _rows(203)
    assert list(read_smiles(rows, is_canonical=False)) == _expected(rows)


@pytest.mark.parametrize("count", [0, 32])
def test_few_rows_start_no_process(monkeypatch, count):
    monkeypatch.setattr(loky, "ProcessPoolExecutor", None)
    rows = _rows(count)
    assert list(read_smiles(rows, is_canonical=False)) == _expected(rows)


def _end_or_hang(text: str) -> str:
    if text == "dies":
        os._exit(7)
    while text == "hangs":
        pass
    return text.upper()


def test_a_row_that_ends_its_process_is_a_reason_and_the_others_are_answered(monkeypatch):
    """Row 40 of 100 dies, and row 70 hangs; the answers of all others are the function's own."""
    monkeypatch.setattr(rdkit_processes, "_answer", partial(_answer_within, 0.2))
    texts = [{40: "dies", 70: "hangs"}.get(row, f"row {row}") for row in range(100)]
    answered = list(map_in_order(_end_or_hang, texts, "reason: {}".format))
    assert len(answered) == len(texts)
    faults = {row: answer for row, answer in enumerate(answered) if answer.startswith("reason")}
    assert list(faults) == [40, 70]
    assert all("20 s" in reason for reason in faults.values())
    assert [answer for answer in answered if not answer.startswith("reason")] == [
        text.upper() for text in texts if text.startswith("row")
    ]


def test_a_ring_of_dummy_atoms_which_rdkit_cannot_finish_is_a_reason(monkeypatch):
    monkeypatch.setattr(rdkit_processes, "_answer", partial(_answer_within, 0.2))
    answered = list(map_in_order(find_invalid_smiles, ["C", f"o1co{'*' * 60}1", "O"], str))
    assert answered[::2] == [None, None]
    assert "crashes" in answered[1]


def _answer_within(seconds: float, function: Callable[[str], Any], texts: list[str]) -> list[Any]:
    """Answer in a worker with another limit of time."""
    rdkit_processes.MAX_SECONDS = seconds  # type: ignore[assignment]
    return _answer(function, texts)


def test_a_machine_without_pgrep_ends_its_processes_too(monkeypatch, capfd):
    """Slim images lack it, and loky, which asks it for the children of its processes, hung there."""
    monkeypatch.setenv("PATH", "")
    rows = [Row("a.smi", 1, "C" * 600), Row("a.smi", 2, "CCO")]
    assert list(read_smiles(rows, is_canonical=False)) == _expected(rows)
    assert capfd.readouterr().err == ""


def test_a_script_needs_no_main_guard_and_runs_nothing_of_its_folder(tmp_path):
    (tmp_path / "queue.py").write_text("from pathlib import Path; Path('it-ran').touch()\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(
        "from exlm_cli.data.rows.records import Row\n"
        "from exlm_cli.data import rdkit_processes, spellings\n"
        "rdkit_processes._CHUNK_ROWS = 8\n"
        "rows = [Row('a.smi', n, 'CCO') for n in range(60)]\n"
        "print(sum(row.problem is None for row in spellings.read_smiles(rows, is_canonical=True)))\n"
    )
    done = subprocess.run(
        [sys.executable, "sub/script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("60\n", "")
    assert not (tmp_path / "it-ran").exists()
