"""Builds and caches the two native libraries of `cuda_ext/`: one for the host, one for CUDA devices.

There are two so that neither needs the other: g++ builds the host library in seconds, nvcc takes about a minute, and if
the CUDA library does not load (the driver is older than its runtime), the host kernels still work.

The file name of a cached library holds a hash of its sources, compiler, flags and, for the host, the processor as the
compiler sees it, so a change to any of them gives a new library. Nothing here imports torch.
"""

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

import filelock

from exlm_cli.paths import cache_root

Kind = Literal["cpu", "cuda"]

CUDA_ARCHITECTURES = ("80", "86", "89", "90", "100")

_SOURCES = {"cpu": "src/states_alignment_cpu.cpp", "cuda": "src/states_alignment_cuda.cu"}
_HOST_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_NVCC_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-shared", "-cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden")
_V3_FEATURES = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
# levels of x86-64 for which wheels hold a host library, best first, with what /proc/cpuinfo must list
PREBUILT_LEVELS = {
    "x86-64-v4": _V3_FEATURES | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
    "x86-64-v3": _V3_FEATURES,
}

_logger = logging.getLogger("exlm_cli")


class BuildError(Exception):
    """A library is missing and cannot be built; the message gives the reason in one line."""


class Plan(NamedTuple):
    """Command that builds a library, and its place in the cache.

    Attributes:
        command: Path of the compiler and its flags, without the output.
        library: Path of the result in the cache.
    """

    command: tuple[str, ...]
    library: Path


def source_dir() -> Path:
    """Return the folder of the native sources: in an installed package, else at the root of a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "cuda_ext"
    return installed if installed.is_dir() else package.parents[1] / "cuda_ext"


def cache_dir() -> Path:
    """Return the folder of compiled libraries: `EXLM_CACHE_DIR`, else `exlm` in the user's cache folder.

    Raises:
        DataError: The user has no home folder, or `EXLM_CACHE_DIR` begins with the home of an unknown user.
    """
    return cache_root(None).absolute()


def prebuilt_library(kind: Kind) -> Path | None:
    """Return the library that came with the sources, for machines without a compiler; None if none fits."""
    folder = source_dir() / "prebuilt"
    if kind == "cuda":
        names = ["libstates_alignment_cuda.so"]
    else:
        features = _processor_features()
        names = [prebuilt_name(level) for level, needed in PREBUILT_LEVELS.items() if needed <= features]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def prebuilt_name(level: str) -> str:
    """Return the file name of a shipped host library."""
    return f"libstates_alignment_cpu-{level}.so"


def build_prebuilt(folder: Path) -> list[Path]:
    """Build the host library for each of `PREBUILT_LEVELS` into `folder`, for wheels.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    compiler, source = find_compiler("cpu"), source_dir() / _SOURCES["cpu"]
    libraries = [folder / prebuilt_name(level) for level in PREBUILT_LEVELS]
    for level, library in zip(PREBUILT_LEVELS, libraries, strict=True):
        _run([compiler, *_HOST_FLAGS, f"-march={level}", str(source), "-o", str(library)])
    return libraries


@functools.cache
def _processor_features() -> frozenset[str]:
    """Return the features that Linux reports for the processor; none elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.split())
    return frozenset()


def find_compiler(kind: Kind) -> str:
    """Return the compiler: `CXX`, g++, c++ or clang++ for the host; nvcc of `CUDA_HOME`, `CUDA_PATH`, PATH,
    /usr/local/cuda or the package nvidia-cuda-nvcc.

    Raises:
        BuildError: None is installed.
    """
    if kind == "cpu":
        candidates = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    else:
        homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
        packages = getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ()
        installed = [str(nvcc) for folder in packages for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"))]
        candidates = [*(f"{home}/bin/nvcc" for home in homes if home), "nvcc", "/usr/local/cuda/bin/nvcc", *installed]
    for candidate in candidates:
        if candidate and (path := shutil.which(candidate)):
            return path
    if kind == "cpu":
        raise BuildError("no C++ compiler found (g++, c++ or clang++)")
    raise BuildError("no nvcc found; `pip install nvidia-cuda-nvcc` brings one")


def version(compiler: str) -> str:
    """Return the line in which a compiler gives its version.

    Raises:
        BuildError: It cannot be run.
    """
    lines = _probe(compiler, "--version").strip().splitlines()
    # nvcc begins with its name and copyright
    return next((line.strip() for line in lines if "release" in line), lines[0].strip() if lines else "no version")


def plan(kind: Kind, *, architectures: tuple[str, ...] = CUDA_ARCHITECTURES) -> Plan:
    """Return how `kind` is built on this machine; asks the compiler for its version, builds nothing.

    Args:
        architectures: Compute capabilities without dots; those that nvcc does not know are skipped.

    Raises:
        BuildError: The compiler is missing or fails.
    """
    sources = source_dir()
    compiler = find_compiler(kind)
    if kind == "cpu":
        flags, identity = _host_flags(compiler)
    else:
        flags = (*_NVCC_FLAGS, *_cuda_targets(compiler, architectures))
        identity = _probe(compiler, "--version")
    digest = hashlib.sha256()
    for text in (kind, _fingerprint(sources), identity, *flags):
        digest.update(text.encode() + b"\0")
    library = cache_dir() / f"states_alignment_{kind}-{digest.hexdigest()[:20]}.so"
    return Plan((compiler, *flags, str(sources / _SOURCES[kind])), library)


def find_library(kind: Kind, *, architectures: tuple[str, ...] = CUDA_ARCHITECTURES) -> Path | None:
    """Return a library that exists, or `None` if it must be built first. A shipped library serves all architectures.

    Raises:
        BuildError: No library exists and none can be built.
    """
    if architectures == CUDA_ARCHITECTURES and (prebuilt := prebuilt_library(kind)):
        return prebuilt
    library = plan(kind, architectures=architectures).library
    return library if library.is_file() else None


def build_library(kind: Kind, *, architectures: tuple[str, ...] = CUDA_ARCHITECTURES) -> Path:
    """Return a library of the cache, built first if it is missing; a second process waits for the one that builds.

    Raises:
        BuildError: The compiler is missing or fails, or the cache cannot be written.
    """
    todo = plan(kind, architectures=architectures)
    if todo.library.is_file():
        return todo.library
    folder = todo.library.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(todo.library.with_suffix(".lock")):
            if not todo.library.is_file():
                # a warning, which shows without set-up: nvcc takes a minute
                _logger.warning("compiling the native alignment kernels with %s (once)", todo.command[0])
                _compile(todo)
    except OSError as error:
        raise BuildError(f"cache folder {folder} cannot be used: {error.strerror or error}") from error
    return todo.library


def _compile(todo: Plan) -> None:
    """Compile to a temporary name beside the library, then rename it, so that a library is complete or absent."""
    with tempfile.TemporaryDirectory(dir=todo.library.parent, prefix="build-") as folder:
        output = Path(folder) / todo.library.name
        _run([*todo.command, "-o", str(output)])
        with output.open("rb") as file:
            os.fsync(file.fileno())  # a crash of the machine would leave a truncated library, which ends Python
        output.replace(todo.library)


def _host_flags(compiler: str) -> tuple[tuple[str, ...], str]:
    """Return the flags for this machine's processor, and the compiler's report of what they mean."""
    probe = [compiler, "-E", "-v", "-x", "c++", os.devnull]
    try:
        return (*_HOST_FLAGS, "-march=native"), _probe(*probe, "-march=native")
    except BuildError:
        # some compilers do not know -march=native on some processors
        return _HOST_FLAGS, _probe(*probe)


def _cuda_targets(nvcc: str, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Return flags for machine code of every architecture that nvcc knows, and PTX of the newest for later ones."""
    known = {line.strip().removeprefix("compute_") for line in _probe(nvcc, "--list-gpu-arch").splitlines()}
    targets = [arch for arch in architectures if arch in known]
    if not targets:
        raise BuildError(f"{nvcc} knows none of the architectures {', '.join(f'sm_{a}' for a in architectures)}")
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in targets]
    return (*code, f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}")


def _fingerprint(sources: Path) -> str:
    """Return a hash of all sources and headers; an edit to any of them gives a new library."""
    digest = hashlib.sha256()
    for path in sorted([*sources.glob("include/*"), *sources.glob("src/*")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _probe(*command: str) -> str:
    """Return a compiler's output; each command runs once per process."""
    return _run(list(command))


def _run(command: list[str]) -> str:
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{name} failed: {_first_error(error.stderr)}") from error
    except OSError as error:
        raise BuildError(f"{name} cannot be run: {error.strerror or error}") from error
    return done.stdout + done.stderr


def _first_error(output: str) -> str:
    """Return the first line with "error" in it, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")
