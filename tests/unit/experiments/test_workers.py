"""Processes for cells, as the operating system sees them. What they do with a cell is pinned in test_cell.py."""

from pathlib import Path

import pytest

from exlm_cli.experiments.workers import Workers


def test_what_lies_in_the_current_directory_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends by itself, with code 0, once its input is closed; a broken module would end it with code 1."""
    (tmp_path / "queue.py").write_text("from pathlib import Path; Path('it-ran').touch(); raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    with Workers([{}], tmp_path / "logs") as workers:
        child = workers._children[0]
        assert child.stdin is not None
        child.stdin.close()
        event = workers.next_event(60.0)
    assert event == (0, {"event": "exit", "code": 0}), workers.log(0).read_text()
    assert not (tmp_path / "it-ran").exists()
