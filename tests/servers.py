"""HTTP servers on a free port of this machine: any handler, and one file whose transfer fails as a test says."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


def connecting_locally(error: BaseException) -> Callable[[socket.socket, Any], None]:
    """Return a `socket.connect` that raises an error for every address but those of this machine."""
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            error.add_note(f"for {address}")
            raise error
        connect(self, address)

    return connect_locally


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address at which requests are handled."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class FaultyFile:
    """A file at an address, served with one fault after the other until there is none left.

    Attributes:
        faults: An address to go to, arguments of `send_error`, or other bytes than those announced.
    """

    def __init__(self, content: bytes) -> None:
        self.url = ""
        self.content = content
        self.faults: list[Any] = []
        self.num_requests = 0


class _Handler(BaseHTTPRequestHandler):
    file: FaultyFile

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        file = self.file
        file.num_requests += 1
        fault = file.faults.pop(0) if file.faults else file.content
        if isinstance(fault, tuple):
            self.send_error(*fault)
        elif isinstance(fault, str):
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(file.content)))
            self.end_headers()
            self.wfile.write(fault)


@contextmanager
def faulty_file(monkeypatch: pytest.MonkeyPatch, content: bytes) -> Iterator[FaultyFile]:
    """Serve a file on this machine, and let its client try again without waiting."""
    file = FaultyFile(content)
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    with serving(type("Handler", (_Handler,), {"file": file})) as address:
        file.url = f"{address}/data/bace.csv"
        yield file
