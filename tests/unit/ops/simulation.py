"""The device kernels compiled for this host, where `cuda_ext/tests/simt.h` runs them thread by thread."""

import ctypes
import os
import subprocess
from pathlib import Path

import filelock

from exlm_cli.ops.alignment import build

ORDERS = (0, 1, 7)  # of the fibers between two barriers: ascending, descending, shuffled
SOURCES = build.source_dir()


def simulator(simulated):
    """Return the simulator's own functions: the order of threads, and a failure of the next call."""
    return ctypes.CDLL(str(simulated.path))


def compile_for_host(tmp_path_factory, source, *flags):
    """Compile a source of `cuda_ext` as C++, once for all processes of a test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    output = folder / Path(source).with_suffix(".so").name
    with filelock.FileLock(output.with_suffix(".lock")):
        if not output.is_file():
            command = [build.find_compiler("cpu"), "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-attributes", *flags]
            subprocess.run([*command, "-x", "c++", str(SOURCES / source), "-o", str(output)], check=True)
    return output
