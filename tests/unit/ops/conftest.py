"""The simulated device, compiled once for all tests of kernels."""

import pytest

from exlm_cli.ops.alignment.library import DeviceLibrary
from tests.unit.ops.simulation import SOURCES, compile_for_host


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> DeviceLibrary:
    """The device library on this host; a simulated device has no stream."""
    simt = ("-include", str(SOURCES / "tests" / "simt.h"))
    return DeviceLibrary(compile_for_host(tmp_path_factory.mktemp("simt"), "src/states_alignment_cuda.cu", *simt))
