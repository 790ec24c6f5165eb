"""How entries of the cache are written and locked."""

import re
import threading
from pathlib import Path

import pytest

from exlm_cli.data.corpus.cache import explaining_disk_trouble, locked, replace_file
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from tests.unit.data.recording import RecordingProgress


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left on device"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_disk_trouble_is_one_line_with_the_file_or_else_the_cache() -> None:
    hint = "free some space, or choose another folder with `EXLM_CACHE_DIR=DIR` (pre-training: also `data.cache_dir`)"
    for error, where in (
        (OSError(28, "No space left on device"), "/cache"),
        (OSError(30, "Read-only file system", "/cache/locks"), "/cache/locks"),
    ):
        message = f"{where}: the data cache cannot be written: {error.strerror}"
        with (
            pytest.raises(DataError, match=rf"^{re.escape(message)}$") as caught,
            explaining_disk_trouble(Path("/cache")),
        ):
            raise error
        assert caught.value.hint == hint


def test_one_of_two_waits_and_says_so(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = RecordingProgress()
    has_lock, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with locked(tmp_path, "key", SilentProgress()):
            has_lock.set()
            may_leave.wait(10)
            order.append("first")

    class Releasing(RecordingProgress):
        def message(self, text: str) -> None:
            waiting.message(text)
            may_leave.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert has_lock.wait(10)
    with locked(tmp_path, "key", Releasing()):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert waiting.messages == ["another process prepares the same data; waiting for it"]


def test_another_key_does_not_wait(tmp_path: Path) -> None:
    progress = RecordingProgress()
    with locked(tmp_path, "a", progress), locked(tmp_path, "b", progress):
        assert progress.messages == []
