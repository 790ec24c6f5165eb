"""What `exlm doctor` says, with compilers that are shell scripts and GPUs that torch only pretends to see."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exlm_cli.errors import BackendError
from exlm_cli.ops.alignment import build, diagnosis, library
from exlm_cli.ops.alignment.build import BuildError
from exlm_cli.ops.alignment.diagnosis import Kernels, build_kernels, diagnose
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder
from tests.unit.ops.conftest import MakeCompiler

HINT = "training works without: the `torch` backend needs no compiler"
AT_FIRST_USE = "compiled at the first use, or now by `exlm doctor --build`"


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The library that all other tests use; compiled before a test points the cache elsewhere."""
    return library.host_library().path


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


class Library:
    """Of a pretended compiler: loads, and runs on the GPUs that `runs_on_gpus` names."""

    runs_on_gpus = (0,)

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs_on(self, device: int) -> bool:
        return device in self.runs_on_gpus

    def check(self, device: int) -> None:
        if not self.runs_on(device):
            raise BuildError(f"it does not run on cuda:{device}")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries of pretended compilers load."""
    monkeypatch.setattr(diagnosis, "HostLibrary", Library)
    monkeypatch.setattr(library, "DeviceLibrary", Library)
    library.device_library.cache_clear()
    yield
    library.device_library.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_compiler_yet", "no_gpu")
def test_a_machine_without_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = diagnose()
    assert (found.compiler, found.nvcc, found.gpus, found.cache) == (None, None, [], str(tmp_path / "cache"))
    assert found.cpu == Kernels(None, "no C++ compiler found (g++, c++ or clang++)", "torch")
    assert found.cuda == Kernels(None, "torch sees no GPU", "none")
    message = "the native cpu kernels cannot be had: no C++ compiler found (g++, c++ or clang++)"
    with pytest.raises(BackendError, match=f"^{re.escape(message)}$") as error:
        build_kernels(SilentProgress())
    assert error.value.hint == HINT


@pytest.mark.usefixtures("no_compiler_yet", "no_gpu")
def test_what_was_shipped_needs_no_compiler(compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.so"
    shutil.copy(compiled, shipped)
    monkeypatch.setattr(build, "prebuilt_library", lambda kind: shipped)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    messages = Recorder()
    build_kernels(messages)
    assert messages.said == []
    assert diagnose().cpu == Kernels(str(shipped), "", "native")


@pytest.mark.usefixtures("no_gpu", "loads")
def test_host_kernels_are_built_once_and_found_again(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler()
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name.endswith("nvcc") else which(name))
    found = diagnose()
    assert found.compiler == f"{compiler} (version 1)"
    assert found.cpu == Kernels(None, AT_FIRST_USE, "native")
    messages = Recorder()
    build_kernels(messages)
    build_kernels(messages)
    assert messages.said == ["compiling the cpu kernels"]
    assert diagnose().cpu == Kernels(str(build.find_library("cpu")), "", "native")


@pytest.mark.usefixtures("one_gpu", "loads")
def test_device_kernels_are_built_for_all_targets_where_nvcc_is(make_compiler: MakeCompiler) -> None:
    make_compiler()
    make_compiler("nvcc", probe="printf 'tools, release 13.0\\ncompute_80\\ncompute_90\\n'")
    found = diagnose()
    assert found.gpus == ["NVIDIA H200 (sm_90)"]
    assert found.nvcc is not None
    assert found.nvcc.endswith("bin/nvcc (tools, release 13.0)")
    assert found.cuda == Kernels(None, AT_FIRST_USE, "native")
    messages = Recorder()
    build_kernels(messages)
    assert messages.said == ["compiling the cpu kernels", "compiling the cuda kernels, about a minute"]
    assert diagnose().cuda == Kernels(str(build.find_library("cuda")), "", "native")


@pytest.mark.usefixtures("one_gpu", "loads")
def test_a_gpu_without_its_compiler_leaves_the_torch_backend_and_fails_a_build(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler()
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name.endswith("nvcc") else which(name))
    assert diagnose().cuda == Kernels(None, "no nvcc found", "torch")
    with pytest.raises(BackendError, match=r"^the native cuda kernels cannot be had: no nvcc found$"):
        build_kernels(SilentProgress())


@pytest.mark.usefixtures("no_gpu")
def test_a_library_that_does_not_load_is_told(make_compiler: MakeCompiler) -> None:
    make_compiler()
    path = build.build_library("cpu")
    message = f"{path} cannot be loaded: {path}: file too short"
    assert diagnose().cpu == Kernels(None, message, "torch")
    with pytest.raises(BackendError, match=f"^{re.escape(f'the native cpu kernels cannot be had: {message}')}$"):
        build_kernels(SilentProgress())


@pytest.mark.usefixtures("loads")
def test_a_gpu_that_no_library_runs_on_leaves_the_others_theirs(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler()
    make_compiler("nvcc", probe="printf 'tools, release 13.0\\ncompute_75\\ncompute_90\\n'")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((9, 0), (7, 5))[device])
    path = str(build.build_library("cuda"))
    assert diagnose().cuda == Kernels(path, f"for cuda:1 {AT_FIRST_USE}", "native")
    messages = Recorder()
    build_kernels(messages)
    # one was compiled for it alone, which says why it is no use
    assert messages.said == ["compiling the cpu kernels", "note: it does not run on cuda:1"]
    assert diagnose().cuda == Kernels(path, "it does not run on cuda:1", "native")
    monkeypatch.setattr(Library, "runs_on_gpus", ())
    library.device_library.cache_clear()
    message = "the native cuda kernels cannot be had: it does not run on cuda:0"
    with pytest.raises(BackendError, match=f"^{message}$"):
        build_kernels(SilentProgress())
    assert diagnose().cuda == Kernels(None, "it does not run on cuda:0", "torch")


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cache() -> Path:
        raise BuildError("there is no home folder to cache libraries in; set EXLM_CACHE_DIR")

    monkeypatch.setattr(build, "cache_dir", no_cache)
    with pytest.raises(BackendError, match=r"^there is no home folder to cache libraries in; set EXLM_CACHE_DIR$"):
        diagnose()
