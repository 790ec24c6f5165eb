"""Files come whole from a local server that breaks off, redirects or serves wrong bytes; nothing else is kept."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from exlm_cli.data.download import RemoteFile, fetch_once
from exlm_cli.errors import DataError
from tests.recorder import Recorder
from tests.servers import FaultyFile, faulty_file

CONTENT = bytes(range(256)) * 800
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFile]:
    with faulty_file(monkeypatch, CONTENT) as server:
        yield server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetch(url: str, sha256: str = SHA256) -> tuple[Path, Recorder]:
    progress = Recorder()
    remote = RemoteFile(url, sha256, len(CONTENT))
    return fetch_once(remote, "moleculenet", progress, hint="do otherwise"), progress


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "moleculenet").iterdir()]


def test_a_file_is_fetched_once_under_a_bar(server, cache):
    path, progress = fetch(server.url)
    assert path == cache / "moleculenet" / f"{SHA256[:12]}-bace.csv"
    assert path.read_bytes() == CONTENT
    assert server.url in progress.said[0]
    (bar,) = progress.bars
    assert (bar.label, bar.total, bar.done[-1]) == ("bace.csv", len(CONTENT), len(CONTENT))
    assert bar.done == sorted(bar.done)
    again, progress = fetch(server.url)
    assert (again, progress.said, server.num_requests) == (path, [], 1)


def test_a_connection_that_breaks_and_a_busy_server_are_tried_again(server, cache):
    server.faults = [CONTENT[:70_000], (503, "Busy")]
    path, _ = fetch(server.url)
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == [path.name]


@pytest.mark.parametrize(
    "faults", [[(404, "Gone")], [(500, "Broken")] * 3, [CONTENT[:100]] * 3], ids=["404", "500", "short"]
)
def test_a_refusal_is_one_error_with_the_hint(server, cache, faults):
    server.faults = list(faults)
    with pytest.raises(DataError, match=f"^{re.escape(server.url)}") as caught:
        fetch(server.url)
    assert caught.value.hint == "do otherwise"
    assert server.num_requests == len(faults)
    assert leftovers(cache) == []


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT * 3], ids=["altered", "long"])
def test_wrong_bytes_are_not_kept_and_not_fetched_again(server, cache, content):
    server.content = content
    with pytest.raises(DataError, match=f"SHA-256 is not {SHA256}; the file was replaced, or altered in transit$"):
        fetch(server.url)
    assert (leftovers(cache), server.num_requests) == ([], 1)
