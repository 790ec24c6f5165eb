"""No test reaches the network, every error of every test has a hint, and runs share a cache of data."""

import socket
from pathlib import Path

import pytest

from exlm_cli.errors import ExlmError
from tests.servers import connecting_locally


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine."""
    refusal = AssertionError("a test reached for the network")
    monkeypatch.setattr(socket.socket, "connect", connecting_locally(refusal))


@pytest.fixture(autouse=True)
def _every_error_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse errors whose hint is empty or repeats the message; mypy refuses those that have none."""
    make = ExlmError.__init__

    def make_with_hint(self: ExlmError, message: str, hint: str) -> None:
        assert hint.strip(), f"no hint: {message}"
        assert hint != message
        make(self, message, hint)

    monkeypatch.setattr(ExlmError, "__init__", make_with_hint)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of prepared data for all runs of a test process, so that each corpus is prepared once."""
    return tmp_path_factory.mktemp("cache")
