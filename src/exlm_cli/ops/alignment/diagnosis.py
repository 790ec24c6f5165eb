"""Report of compilers, native libraries and the backend in use, for `exlm doctor`."""

import platform
from dataclasses import dataclass

import torch

from exlm_cli.errors import BackendError
from exlm_cli.format import format_number_of
from exlm_cli.ops.alignment import build
from exlm_cli.ops.alignment.build import BuildError, Kind
from exlm_cli.ops.alignment.library import HostLibrary, device_library, find_device_library
from exlm_cli.progress import Progress

_HINT = "training works without them, slower: the `reference` backend needs no compiler"
_AT_FIRST_USE = "compiled at the first use, or now by `exlm doctor --build`"


@dataclass(frozen=True)
class Kernels:
    """State of one of the two libraries.

    Attributes:
        path: The library if it exists and loads (without a GPU it is not loaded); of several GPUs, the first one's.
        note: Where a library is missing, also for one GPU of several: when it is built, or why it cannot be.
        backend: What `backend: auto` uses on such a device, now or after the build.
    """

    path: str | None
    note: str
    backend: str


@dataclass(frozen=True)
class Diagnosis:
    """The report; compilers are `path (version)`, None if there is none."""

    torch: str
    processor: str
    gpus: list[str]
    compiler: str | None
    nvcc: str | None
    cache: str
    cpu: Kernels
    cuda: Kernels


def diagnose() -> Diagnosis:
    """Return the report; builds nothing.

    Raises:
        BackendError: The folder of cached libraries cannot be determined.
    """
    try:
        cache = str(build.cache_dir())
    except BuildError as error:
        raise BackendError(str(error), _HINT) from error
    num_gpus, host = torch.cuda.device_count(), _host_kernels()
    return Diagnosis(
        torch=f"{torch.__version__}, {format_number_of(torch.get_num_threads(), 'thread')}",
        processor=platform.processor() or platform.machine(),
        gpus=[_describe_gpu(device) for device in range(num_gpus)],
        compiler=_describe_compiler("cpu"),
        nvcc=_describe_compiler("cuda"),
        cache=cache,
        cpu=host,
        cuda=_device_kernels(num_gpus, host) if num_gpus else Kernels(_cuda_library(), "torch sees no GPU", "none"),
    )


def build_kernels(progress: Progress) -> None:
    """Build the host kernels and, on a machine with nvcc or a GPU, the device kernels for all architectures.

    Raises:
        BackendError: A build fails, or no GPU of this machine can run the device kernels.
    """
    kinds: tuple[Kind, ...] = ("cpu", "cuda") if _describe_compiler("cuda") or torch.cuda.is_available() else ("cpu",)
    for kind in kinds:
        try:
            path = build.find_library(kind)
            if path is None:
                progress.message(f"compiling the {kind} kernels" + (", about a minute" if kind == "cuda" else ""))
                path = build.build_library(kind)
            if kind == "cpu":
                HostLibrary(path)
            else:
                _serve_every_gpu(progress)
        except BuildError as error:
            raise BackendError(f"the native {kind} kernels are not available: {error}", _HINT) from error


def _serve_every_gpu(progress: Progress) -> None:
    """Load kernels for each GPU; report the GPUs that have none, or raise if all of them have none."""
    obstacles = []
    for device in range(torch.cuda.device_count()):
        try:
            device_library(device)
        except BuildError as error:
            obstacles.append(error)
    if obstacles and len(obstacles) == torch.cuda.device_count():
        raise obstacles[0]
    for obstacle in obstacles:
        progress.message(f"note: {obstacle}")


def _host_kernels() -> Kernels:
    try:
        path = build.find_library("cpu")
        if path is None:
            return Kernels(None, _AT_FIRST_USE, "native")
        HostLibrary(path)
    except BuildError as error:
        return Kernels(None, str(error), "reference")
    return Kernels(str(path), "", "native")


def _device_kernels(num_gpus: int, host: Kernels) -> Kernels:
    paths: list[str] = []
    to_come: list[str] = []
    obstacles: list[str] = []
    for device in range(num_gpus):
        try:
            library = find_device_library(device)
        except BuildError as error:
            obstacles.append(str(error))
        else:
            if library is None:
                to_come.append(f"cuda:{device}")
            else:
                paths.append(str(library.path))
    if not paths and not to_come:
        return Kernels(None, obstacles[0], "native, on the host" if host.backend == "native" else "reference")
    if len(to_come) == num_gpus:
        return Kernels(None, _AT_FIRST_USE, "native")
    later = [f"for {', '.join(to_come)} {_AT_FIRST_USE}"] if to_come else []
    return Kernels(paths[0] if paths else None, "; ".join(later + obstacles), "native")


def _cuda_library() -> str | None:
    try:
        path = build.find_library("cuda")
    except BuildError:
        return None
    return str(path) if path else None


def _describe_compiler(kind: Kind) -> str | None:
    try:
        path = build.find_compiler(kind)
        return f"{path} ({build.version(path)})"
    except BuildError:
        return None


def _describe_gpu(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
