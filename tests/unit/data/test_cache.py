"""How entries of the cache are written and locked."""

import threading

import pytest

from exlm_cli.data.cache import explaining_disk_trouble, locked, remember
from exlm_cli.errors import DataError
from exlm_cli.files import write_atomically
from exlm_cli.progress import SilentProgress


def test_an_entry_that_cannot_be_written_is_trouble_of_the_cache(tmp_path):
    (tmp_path / "folder").mkdir()
    remember(tmp_path / "folder", b"")  # which only saves work
    with (
        pytest.raises(DataError, match=r"the data cache cannot be read or written: Is a directory$") as caught,
        explaining_disk_trouble(tmp_path),
    ):
        write_atomically(tmp_path / "folder", b"")
    assert caught.value.hint.startswith("choose another folder with `EXLM_CACHE_DIR=DIR`"), "there is space"


def test_one_of_two_waits_and_says_so(tmp_path):
    order: list[str] = []
    is_waiting = threading.Event()

    class Waiting(SilentProgress):
        def message(self, text: str) -> None:
            order.append(text)
            is_waiting.set()

    def second() -> None:
        with locked(tmp_path, "key", Waiting()):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(tmp_path, "key", SilentProgress()):
        thread.start()
        assert is_waiting.wait(10)
        order.append("first")
    thread.join()
    assert order == ["another process prepares the same data; waiting for it", "first", "second"]
