"""Backends and dtypes of the alignment op; the simulated device; compilers that are shell scripts."""

import itertools

import pytest
import torch

from exlm_cli.errors import BackendError
from exlm_cli.ops.alignment import choose_backend
from exlm_cli.ops.alignment.library import DeviceLibrary
from tests.unit.ops.simulation import SOURCES, compile_for_host


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(params=["reference", "native"])
def backend(request):
    """Every alignment backend that this machine has; takes the test's `dtype` where it names one."""
    dtype = request.getfixturevalue("dtype") if "dtype" in request.fixturenames else torch.float32
    try:
        return choose_backend(request.param, dtype)
    except BackendError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def simulated(tmp_path_factory):
    """The device library on this host; a simulated device has no stream."""
    simt = ("-include", str(SOURCES / "tests" / "simt.h"))
    return DeviceLibrary(compile_for_host(tmp_path_factory, "src/states_alignment_cuda.cu", *simt))


@pytest.fixture
def no_compiler_yet(tmp_path, monkeypatch):
    """An empty cache, and no compiler that the environment names."""
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_compiler(no_compiler_yet, tmp_path, monkeypatch):
    """A script in place of g++ that answers `-v`, counts its builds and copies a library to its last argument."""
    numbers = itertools.count()

    def make(name="g++", *, probe="echo version 1", compile_="", library=None):
        tools = tmp_path / f"tools-{next(numbers)}"  # each compiler is asked once in a process, by its path
        script = tools / "bin" / name
        script.parent.mkdir(parents=True)
        script.write_text(
            f"""#!/bin/sh
case "$*" in
  *-v\\ *|*--version*|*--list-gpu-arch*) {probe}; exit;;
esac
{compile_}
echo built >> {tmp_path}/builds
for output; do :; done
{"echo library >" if library is None else f"cp {library}"} "$output"
"""
        )
        script.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME" if name == "nvcc" else "CXX", str(tools if name == "nvcc" else script))
        return script

    return make
