"""Report of compilers, native libraries and the backend in use, for `exlm doctor`."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from exlm_cli.errors import BackendError
from exlm_cli.format import format_number_of
from exlm_cli.ops.alignment import build
from exlm_cli.ops.alignment.build import BuildError, Kind
from exlm_cli.ops.alignment.library import DeviceLibrary, HostLibrary, device_library, find_device_library
from exlm_cli.progress import Progress

_HINT = "training works without them, slower: the `reference` backend needs no compiler"
_AT_FIRST_USE = "compiled at the first use, or now by `exlm doctor --build`"


@dataclass(frozen=True)
class LibraryState:
    """State of one of the two libraries.

    Attributes:
        path: The library if it exists and loads; of several GPUs, that of the first one.
        note: Where a library is missing: when it is built, or why it cannot be.
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
    cpu: LibraryState
    cuda: LibraryState


def diagnose() -> Diagnosis:
    """Return the report; builds nothing.

    Raises:
        DataError: There is no folder for cached libraries.
    """
    host = _state(_find_host_library, "reference")
    return Diagnosis(
        torch=f"{torch.__version__}, {format_number_of(torch.get_num_threads(), 'thread')}",
        processor=platform.processor() or platform.machine(),
        gpus=[_describe_gpu(device) for device in range(torch.cuda.device_count())],
        compiler=_describe_compiler("cpu"),
        nvcc=_describe_compiler("cuda"),
        cache=str(build.cache_dir()),
        cpu=host,
        cuda=_state(partial(find_device_library, 0), "native, on the host" if host.backend == "native" else "reference")
        if torch.cuda.device_count()
        else LibraryState(None, "torch sees no GPU", "none"),
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


def _state(find: Callable[[], HostLibrary | DeviceLibrary | None], otherwise: str) -> LibraryState:
    """Return the state of a library that `find` returns, if it is built; `otherwise` is in use where it cannot be."""
    try:
        library = find()
    except BuildError as error:
        return LibraryState(None, str(error), otherwise)
    if library is None:
        return LibraryState(None, _AT_FIRST_USE, "native")
    return LibraryState(str(library.path), "", "native")


def _find_host_library() -> HostLibrary | None:
    path = build.find_library("cpu")
    return None if path is None else HostLibrary(path)


def _describe_compiler(kind: Kind) -> str | None:
    try:
        path = build.find_compiler(kind)
        return f"{path} ({build.version(path)})"
    except BuildError:
        return None


def _describe_gpu(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
