"""Checking in several processes gives what checking one by one gives, in order."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import loky
import pytest

from exlm_cli.data import smiles_check
from exlm_cli.data.rows.records import Row
from exlm_cli.data.smiles import find_invalid_smiles
from exlm_cli.data.smiles_check import check_smiles
from exlm_cli.errors import DataError


def _rows(count: int) -> list[Row]:
    texts = ["CCO", "c1cccc1", "", "Cl", "Xe?"]
    return [Row("a.smi", n, texts[n % 5], problem="broken" if n % 7 == 0 else None) for n in range(1, count + 1)]


def _expected(rows: list[Row]) -> list[tuple[Row, str | None]]:
    return [(row, row.problem or find_invalid_smiles(row.text)) for row in rows]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smiles_check, "_CHUNK_ROWS", 8)


def test_two_processes_give_the_same_answers_in_the_same_order() -> None:
    rows = _rows(203)
    assert list(check_smiles(rows, 2)) == _expected(rows)


@pytest.mark.parametrize(("count", "num_processes"), [(0, 2), (32, 2), (50, 1)])
def test_few_rows_or_one_core_start_no_process(monkeypatch: pytest.MonkeyPatch, count: int, num_processes: int) -> None:
    monkeypatch.setattr(loky, "ProcessPoolExecutor", None)
    rows = _rows(count)
    assert list(check_smiles(rows, num_processes)) == _expected(rows)


def test_stopping_early_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    executor = loky.ProcessPoolExecutor
    monkeypatch.setattr(loky, "ProcessPoolExecutor", lambda *a, **k: started.append(executor(*a, **k)) or started[-1])
    checked = check_smiles(_rows(400), 2)
    for _ in range(40):
        next(checked)
    (processes,) = [list(pool._processes.values()) for pool in started]
    checked.close()  # type: ignore[attr-defined]
    assert len(processes) == 2
    assert not any(process.is_alive() for process in processes)


def test_a_process_that_dies_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smiles_check, "_find_reasons", lambda _: os._exit(7))
    with pytest.raises(DataError, match=r"^a\.smi: .*died") as caught:
        list(check_smiles(_rows(64), 2))
    assert "RDKit" in caught.value.hint


def test_a_script_needs_no_main_guard_and_runs_nothing_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("from pathlib import Path; Path('it-ran').touch()\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(
        "from exlm_cli.data.rows.records import Row\n"
        "from exlm_cli.data import smiles_check\n"
        "smiles_check._CHUNK_ROWS = 8\n"
        "rows = [Row('a.smi', n, 'CCO') for n in range(60)]\n"
        "print(sum(problem is None for _, problem in smiles_check.check_smiles(rows, 2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "sub/script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("60\n", "")
    assert not (tmp_path / "it-ran").exists()
