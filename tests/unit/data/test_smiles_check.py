"""Checking in several processes gives what checking one by one gives, in order."""

import io
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from exlm_cli.data import smiles_check
from exlm_cli.data.rows.records import Row
from exlm_cli.data.smiles import find_invalid_smiles
from exlm_cli.data.smiles_check import check_smiles, main
from exlm_cli.errors import DataError


def _rows(count: int) -> list[Row]:
    texts = ["CCO", "c1cccc1", "", "Cl", "Xe?"]
    return [Row("a.smi", n, texts[n % 5], problem="broken" if n % 7 == 0 else None) for n in range(1, count + 1)]


def _expected(rows: list[Row]) -> list[tuple[Row, str | None]]:
    return [(row, row.problem or find_invalid_smiles(row.text)) for row in rows]


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smiles_check, "_CHUNK_ROWS", 8)


def test_one_process_checks_row_by_row() -> None:
    rows = _rows(50)
    assert list(check_smiles(rows, 1)) == _expected(rows)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("count", [0, 32, 33, 203])
def test_two_processes_give_the_same_answers_in_the_same_order(count: int) -> None:
    rows = _rows(count)
    assert list(check_smiles(rows, 2)) == _expected(rows)


@pytest.mark.usefixtures("_small_chunks")
def test_few_rows_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    rows = _rows(32)
    assert list(check_smiles(rows, 2)) == _expected(rows)


@pytest.mark.usefixtures("_small_chunks")
def test_stopping_early_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    checked = check_smiles(_rows(400), 2)
    for _ in range(40):
        next(checked)
    checked.close()  # type: ignore[attr-defined]
    assert [child.returncode for child in started] == [-signal.SIGKILL, -signal.SIGKILL]


@pytest.mark.usefixtures("_small_chunks")
def test_a_process_that_dies_is_reported_with_the_rows_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda arguments, **k: popen([arguments[0], "-c", "exit(7)"], **k))
    message = "a.smi: the process that checked rows 33 to 40 with RDKit died with code 7"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$"):
        list(check_smiles(_rows(64), 2))


@pytest.mark.usefixtures("_small_chunks")
def test_what_lies_in_the_current_directory_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("from pathlib import Path; Path('it-ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    rows = _rows(100)
    assert list(check_smiles(rows, 2)) == _expected(rows)
    assert not (tmp_path / "it-ran").exists()


def test_a_child_answers_each_line_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("sys.stdin", io.StringIO('["CCO", ""]\n["C1"]\n'))
    monkeypatch.setattr("sys.stdout", out := io.StringIO())
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, before)
    first, second = out.getvalue().splitlines()
    assert json.loads(first) == [None, "is empty"]
    assert json.loads(second) == ["RDKit cannot parse it: it breaks the SMILES grammar"]


def test_the_default_is_one_process_per_usable_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(smiles_check, "_CHUNK_ROWS", 1)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert list(check_smiles(_rows(20))) == _expected(_rows(20))
