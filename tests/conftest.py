"""No test reaches the network or depends on chance, every error has a hint, and runs share a cache of data."""

import gc
import os
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from exlm_cli import bundled_models
from exlm_cli.errors import ExlmError
from tests.servers import connecting_locally

settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# each entry of torch's cache of traced operators is verified, which with sizes as symbols is half the time of a trace
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"

# no test can see what is left after a machine has crashed, and a run would wait for the disk as long as it computes
os.fsync = lambda _: None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what the test modules import from the garbage collector, which would walk it all over and over again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000)  # far fewer walks than by default, over what the tests make
        gc.enable()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine."""
    refusal = AssertionError("a test reached for the network")
    monkeypatch.setattr(socket.socket, "connect", connecting_locally(refusal))


@pytest.fixture(autouse=True)
def _no_bundled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the models of the package, so that a command without a checkpoint finds those that the test makes."""
    monkeypatch.setattr(bundled_models, "FOLDER", Path("no-models"))


@pytest.fixture(autouse=True)
def _every_error_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse errors whose hint is empty or repeats the message; mypy refuses those that have none."""
    make = ExlmError.__init__

    def make_with_hint(self: ExlmError, message: str, hint: str) -> None:
        assert hint.strip(), f"no hint: {message}"
        assert hint != message
        make(self, message, hint)

    monkeypatch.setattr(ExlmError, "__init__", make_with_hint)


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the files of figures blank: drawing takes seconds, and `tests/unit/report` looks at the drawings."""

    def blank_files(figure: object, folder: Path, stem: str) -> dict[Path, bytes]:
        return {folder / f"{stem}.{suffix}": b"" for suffix in ("png", "svg")}

    monkeypatch.setattr("exlm_cli.report.style.figure_files", blank_files)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of prepared data for all runs of a test process, so that each corpus is prepared once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def kernels() -> Path | None:
    """Return the compiled kernels of this machine; None where they cannot be built."""
    # not above: the process that only hands tests to workers reads this file too, and would wait for torch
    from exlm_cli.ops.alignment.build import BuildError, build_library

    try:
        return build_library("cpu")
    except BuildError:
        return None


@pytest.fixture
def own_cache(tmp_path: Path, kernels: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find a cache with nothing but kernels, which take seconds to build."""
    cache = tmp_path / "cache"
    cache.mkdir()
    if kernels is not None:
        (cache / kernels.name).symlink_to(kernels)
    monkeypatch.setenv("EXLM_CACHE_DIR", str(cache))
