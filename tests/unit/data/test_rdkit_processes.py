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


def test_two_processes_give_the_same_answers_in_the_same_order_and_few_rows_start_none(monkeypatch):
    rows = _rows(203)
    assert list(read_smiles(rows, is_canonical=False)) == _expected(rows)
    monkeypatch.setattr(loky, "ProcessPoolExecutor", None)
    for few in (rows[:32], []):
        assert list(read_smiles(few, is_canonical=False)) == _expected(few)


RING = f"o1co{'*' * 60}1"
"""A ring of dummy atoms, which RDKit cannot finish."""


def _die_or_judge(text: str) -> str | None:
    if text == "dies":
        os._exit(7)
    return find_invalid_smiles(text)


def test_rows_that_end_their_process_or_never_end_are_reasons_and_the_others_are_answered(monkeypatch):
    monkeypatch.setattr(rdkit_processes, "_answer", partial(_answer_within, 0.5))
    texts = ["C", "O", RING, *["c1cccc1", "N"] * 9, "dies", *["CC", "C1"] * 9]
    reason = "RDKit needs over 20 s for it, or crashes"
    expected = [reason if text in ("dies", RING) else find_invalid_smiles(text) for text in texts]
    assert list(map_in_order(_die_or_judge, texts, str)) == expected


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
    assert done.stdout == "60\n"
    assert "Traceback" not in done.stderr  # on a busy machine, loky may warn of its own semaphores at the end
    assert not (tmp_path / "it-ran").exists()
