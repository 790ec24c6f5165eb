"""How entries of the cache are written and locked."""

import threading
from pathlib import Path

import pytest

from exlm_cli.data.corpus.cache import explaining_disk_trouble, locked, write_entry
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder


def test_disk_trouble_is_one_line_with_the_file_or_else_the_cache(tmp_path):
    (tmp_path / "folder").mkdir()
    for error, where in (
        (OSError(28, "No space left on device"), "/cache"),
        (OSError(30, "Read-only file system", "/cache/locks"), "/cache/locks"),
    ):
        with (
            pytest.raises(DataError, match=rf"^{where}: .*{error.strerror}$") as caught,
            explaining_disk_trouble(Path("/cache")),
        ):
            raise error
        assert "`EXLM_CACHE_DIR=DIR`" in caught.value.hint
        assert "`data.cache_dir`" in caught.value.hint
    with (
        pytest.raises(DataError, match=r"the data cache cannot be written: Is a directory$"),
        explaining_disk_trouble(tmp_path),
    ):
        write_entry(tmp_path / "folder", b"")


def test_one_of_two_waits_and_says_so(tmp_path):
    order: list[str] = []
    waiting = Recorder()
    has_lock, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with locked(tmp_path, "key", SilentProgress()):
            has_lock.set()
            may_leave.wait(10)
            order.append("first")

    class Releasing(Recorder):
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
    assert waiting.said == ["another process prepares the same data; waiting for it"]
