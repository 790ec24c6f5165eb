"""How an entry of the cache is made."""

import threading
from unittest.mock import Mock

from exlm_cli.data.cache import load_or_build
from exlm_cli.progress import SilentProgress


def test_one_of_two_builds_an_entry_and_the_other_waits_says_so_and_loads_it(tmp_path):
    entry, said, loaded, is_waiting = tmp_path / "entry", list[str](), list[str](), threading.Event()

    class Waiting(SilentProgress):
        def message(self, text: str) -> None:
            said.append(text)
            is_waiting.set()

    def second() -> None:
        never = Mock(side_effect=AssertionError)
        loaded.append(load_or_build(tmp_path, entry, entry.read_text, never, Waiting(), remedy=""))

    thread = threading.Thread(target=second)

    def build() -> str:
        thread.start()
        assert is_waiting.wait(10)
        entry.write_text("built")
        return "built"

    assert load_or_build(tmp_path, entry, entry.read_text, build, SilentProgress(), remedy="") == "built"
    thread.join()
    assert (loaded, said) == (["built"], ["another process prepares the same data; waiting for it"])
