"""What the native backend finds on this machine, for `exlm doctor`: compilers, libraries, and what would be used."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from exlm_cli.errors import BackendError
from exlm_cli.ops.alignment import build
from exlm_cli.ops.alignment.build import BuildError, Kind
from exlm_cli.ops.alignment.library import DeviceLibrary, HostLibrary
from exlm_cli.progress import Progress

_HINT = "training works without: the `torch` backend needs no compiler"


@dataclass(frozen=True)
class Kernels:
    """One of the two libraries.

    Attributes:
        path: The library that is there and loads.
        note: Where there is none: when it comes, or why it cannot be had.
        backend: What `backend: auto` uses on such a device, now or after compiling.
    """

    path: str | None
    note: str
    backend: str


@dataclass(frozen=True)
class Diagnosis:
    """What was found; compilers are `path (version)`, None where there is none."""

    torch: str
    processor: str
    gpus: list[str]
    compiler: str | None
    nvcc: str | None
    cache: str
    cpu: Kernels
    cuda: Kernels


def diagnose() -> Diagnosis:
    """Look, without compiling anything.

    Raises:
        BackendError: There is no folder to cache libraries in.
    """
    try:
        cache = str(build.cache_dir())
    except BuildError as error:
        raise BackendError(str(error), _HINT) from error
    num_gpus = torch.cuda.device_count()
    return Diagnosis(
        torch=f"{torch.__version__}, {torch.get_num_threads()} threads",
        processor=platform.processor() or platform.machine(),
        gpus=[_describe_gpu(device) for device in range(num_gpus)],
        compiler=_describe_compiler("cpu"),
        nvcc=_describe_compiler("cuda"),
        cache=cache,
        cpu=_kernels("cpu"),
        cuda=_kernels("cuda") if num_gpus else Kernels(_found("cuda"), "torch sees no GPU", "none"),
    )


def build_kernels(progress: Progress) -> None:
    """Compile the host kernels and, where nvcc or a GPU is there, the device kernels for all targets.

    Raises:
        BackendError: One of them cannot be had.
    """
    kinds: tuple[Kind, ...] = ("cpu", "cuda") if _describe_compiler("cuda") or torch.cuda.is_available() else ("cpu",)
    for kind in kinds:
        try:
            if build.find_library(kind) is None:
                progress.message(f"compiling the {kind} kernels" + (", about a minute" if kind == "cuda" else ""))
            _load(kind, build.build_library(kind))
        except BuildError as error:
            raise BackendError(f"the native {kind} kernels cannot be had: {error}", _HINT) from error


def _kernels(kind: Kind) -> Kernels:
    try:
        path = build.find_library(kind)
        if path is None:
            return Kernels(None, "compiled at the first use, or now by `exlm doctor --build`", "native")
        _load(kind, path)
    except BuildError as error:
        return Kernels(None, str(error), "torch")
    return Kernels(str(path), "", "native")


def _found(kind: Kind) -> str | None:
    try:
        path = build.find_library(kind)
    except BuildError:
        return None
    return str(path) if path else None


def _load(kind: Kind, path: Path) -> None:
    """Load a library, and see whether every GPU takes it."""
    if kind == "cpu":
        HostLibrary(path)
        return
    library = DeviceLibrary(path)
    for device in range(torch.cuda.device_count()):
        library.check(device)


def _describe_compiler(kind: Kind) -> str | None:
    try:
        path = build.find_compiler(kind)
        return f"{path} ({build.version(path)})"
    except BuildError:
        return None


def _describe_gpu(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
