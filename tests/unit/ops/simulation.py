"""The device kernels compiled for this host, where `cuda_ext/tests/simt.h` runs them thread by thread."""

import functools
import subprocess
from pathlib import Path

from exlm_cli.ops.alignment import build

ORDERS = (0, 1, 7)  # of the fibers between two barriers: ascending, descending, shuffled
SOURCES = build.source_dir()


@functools.cache
def compile_for_host(folder: Path, source: str, *flags: str) -> Path:
    """Compile a source of `cuda_ext` as C++."""
    output = folder / Path(source).with_suffix(".so").name
    command = [build.find_compiler("cpu"), "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-attributes", *flags]
    subprocess.run([*command, "-x", "c++", str(SOURCES / source), "-o", str(output)], check=True)
    return output
