"""Files come whole from a local server that breaks off, serves wrong bytes or knows no ranges; nothing else is kept."""

import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.data.download import RemoteFile, fetch_once
from exlm_cli.errors import DataError
from tests.unit.data.recording import RecordingProgress

CONTENT = bytes(range(256)) * 800
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class FaultyServer(http.server.ThreadingHTTPServer):
    """Serves `content` at every path, with one fault after the other until there is none left."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.knows_ranges = True
        self.faults: list[Any] = []
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data/bace.csv"


class Handler(http.server.BaseHTTPRequestHandler):
    server: FaultyServer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.ranges.append(asked)
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, str):
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
            return
        if isinstance(fault, tuple):
            self.send_error(*fault)
            return
        content, start = self.server.content, 0
        if asked and self.server.knows_ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][:fault])


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetch(url: str, **known: Any) -> tuple[Path, list[str], list[float]]:
    progress, waits = RecordingProgress(), list[float]()
    remote = RemoteFile(url, known.get("sha256", SHA256), known.get("size_bytes", len(CONTENT)))
    path = fetch_once(remote, "moleculenet", progress, hint="do otherwise", pause=waits.append)
    return path, progress.messages, waits


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "moleculenet").iterdir()]


def test_a_file_is_fetched_once(server: FaultyServer, cache: Path) -> None:
    path, messages, waits = fetch(server.url)
    assert path == cache / "moleculenet" / f"{SHA256[:12]}-bace.csv"
    assert path.read_bytes() == CONTENT
    assert messages == [f"fetching {server.url} (204,800 bytes) into {cache / 'moleculenet'}"]
    again, messages, _ = fetch(server.url)
    assert again == path
    assert messages == waits == []
    assert server.ranges == [None]


def test_a_copy_that_was_altered_is_fetched_anew(server: FaultyServer) -> None:
    path, _, _ = fetch(server.url)
    path.write_bytes(CONTENT[::-1])
    assert fetch(server.url)[0].read_bytes() == CONTENT


def test_what_broke_off_goes_on_where_it_was(server: FaultyServer, cache: Path) -> None:
    server.faults = [70_000, 10]
    path, messages, waits = fetch(server.url)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=70000-", "bytes=70010-"]
    assert messages[1:] == [
        "the connection ended after 70,000 of 204,800 bytes; trying again in 1 s",
        "the connection ended after 70,010 of 204,800 bytes; trying again in 4 s",
    ]
    assert waits == [1.0, 4.0]
    assert leftovers(cache) == [path.name]


def test_a_later_run_goes_on_too(server: FaultyServer, cache: Path) -> None:
    server.faults = [100, 100, 100]
    with pytest.raises(DataError) as caught:
        fetch(server.url)
    assert caught.value.message == (f"{server.url}: cannot be fetched: the connection ended after 300 of 204,800 bytes")
    assert caught.value.hint == "do otherwise"
    assert fetch(server.url)[0].read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=300-"


def test_a_server_without_ranges_sends_all_of_it_again(server: FaultyServer) -> None:
    server.knows_ranges = False
    server.faults = [70_000]
    assert fetch(server.url)[0].read_bytes() == CONTENT


def test_a_server_that_is_busy_is_asked_again(server: FaultyServer) -> None:
    server.faults = [(503, "Busy")]
    path, messages, _ = fetch(server.url)
    assert path.read_bytes() == CONTENT
    assert messages[1] == "the server answers 503 Busy; trying again in 1 s"


@pytest.mark.parametrize(("faults", "answer"), [([(404, "Gone")], "404 Gone"), ([(500, "Broken")] * 3, "500 Broken")])
def test_a_refusal_is_told(server: FaultyServer, cache: Path, faults: list[Any], answer: str) -> None:
    server.faults = faults
    with pytest.raises(DataError, match=f"^{re.escape(f'{server.url}: the server answers {answer}')}$"):
        fetch(server.url)
    assert leftovers(cache) == []


def test_wrong_bytes_are_thrown_away(server: FaultyServer, cache: Path) -> None:
    server.content = CONTENT[::-1]
    found = hashlib.sha256(server.content).hexdigest()
    message = f"{server.url}: SHA-256 is {found}, expected {SHA256}; the file was thrown away"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        fetch(server.url)
    assert leftovers(cache) == []


def test_more_bytes_than_known_are_not_taken(server: FaultyServer, cache: Path) -> None:
    server.content = CONTENT * 3
    message = f"{server.url}: the server sends more than the expected 204,800 bytes"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        fetch(server.url)
    assert leftovers(cache) == []


def test_a_part_longer_than_the_file_is_begun_anew(server: FaultyServer, cache: Path) -> None:
    path, _, _ = fetch(server.url)
    path.unlink()
    path.with_name(f".{path.name}.part").write_bytes(CONTENT + b"more")
    assert fetch(server.url)[0].read_bytes() == CONTENT
    assert server.ranges[-1] is None


def test_a_part_that_is_whole_needs_no_server(server: FaultyServer, cache: Path) -> None:
    path, _, _ = fetch(server.url)
    path.rename(path.with_name(f".{path.name}.part"))
    assert fetch(server.url)[0].read_bytes() == CONTENT
    assert len(server.ranges) == 1


def test_nobody_listening_is_told(server: FaultyServer) -> None:
    url = server.url
    server.server_close()
    with pytest.raises(DataError, match=rf"^{re.escape(url)}: cannot be fetched: \[Errno \d+\] Connection refused$"):
        fetch(url)


def test_redirects_stay_on_https_or_this_machine(server: FaultyServer) -> None:
    server.faults = [server.url + "?again"]
    assert fetch(server.url)[0].read_bytes() == CONTENT
    server.faults = ["http://example.com/bace.csv"]
    with pytest.raises(DataError) as caught:
        fetch(server.url, sha256="0" * 64)
    assert caught.value.message == f"{server.url}: leads to http://example.com/bace.csv, which is not an https address"


@pytest.mark.parametrize("url", ["http://example.com/bace.csv", "file:///etc/passwd", "ftp://example.com/bace.csv"])
def test_only_https_is_fetched(url: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(url)}: is not an https address$"):
        fetch(url)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a\\b"])
def test_a_name_cannot_leave_the_cache(name: str) -> None:
    url = f"https://example.com/data/{name}"
    with pytest.raises(DataError, match=f"^{re.escape(repr(name))} is not a file name$"):
        fetch(url)


def test_a_cache_that_cannot_be_written_is_named(server: FaultyServer, cache: Path) -> None:
    cache.write_text("a file stands in its place")
    with pytest.raises(DataError, match="the data cache cannot be written"):
        fetch(server.url)
