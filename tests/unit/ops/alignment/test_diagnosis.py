"""The report of `exlm doctor`, with shell scripts in place of compilers and GPUs that torch only pretends to see."""

import shutil

import pytest
import torch

from exlm_cli.errors import BackendError
from exlm_cli.ops.alignment import build, library
from exlm_cli.ops.alignment.diagnosis import LibraryState, build_kernels, diagnose
from exlm_cli.ops.alignment.library import DeviceLibrary
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder

NO_NVCC = "no nvcc found; `pip install nvidia-cuda-nvcc` brings one"


def see_gpus(monkeypatch, *capabilities):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])


@pytest.fixture(autouse=True)
def _no_device_library_yet():
    library.device_library.cache_clear()
    yield
    library.device_library.cache_clear()


def assert_no_build(*parts):
    with pytest.raises(BackendError) as caught:
        build_kernels(SilentProgress())
    assert all(part in caught.value.message for part in parts)
    assert "`reference` backend" in caught.value.hint


@pytest.mark.usefixtures("no_compiler_yet")
def test_a_machine_without_compilers(monkeypatch, tmp_path):
    see_gpus(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = diagnose()
    assert (found.compiler, found.nvcc, found.gpus, found.cache) == (None, None, [], str(tmp_path / "cache"))
    assert found.cpu == LibraryState(None, "no C++ compiler found (g++, c++ or clang++)", "reference")
    assert found.cuda == LibraryState(None, "torch sees no GPU", "none")
    assert_no_build("cpu", "g++")
    see_gpus(monkeypatch, (9, 0))
    assert diagnose().cuda == LibraryState(None, NO_NVCC, "reference")


def test_a_gpu_takes_the_host_kernels_until_nvcc_is_there(make_compiler, monkeypatch, kernels, simulated):
    make_compiler(library=kernels)
    see_gpus(monkeypatch, (9, 0))
    with monkeypatch.context() as patch:
        which = shutil.which
        patch.setattr(shutil, "which", lambda name: None if name.endswith("nvcc") else which(name))
        assert diagnose().cuda == LibraryState(None, NO_NVCC, "native, on the host")
        assert_no_build("cuda", NO_NVCC)
    probe = "printf 'tools, release 13.0\\ncompute_80\\ncompute_90\\n'"
    make_compiler("nvcc", probe=probe, library=simulated.path)
    found = diagnose()
    assert found.gpus == ["NVIDIA H200 (sm_90)"]
    assert (found.nvcc or "").endswith("bin/nvcc (tools, release 13.0)")
    assert (found.cuda.path, found.cuda.backend) == (None, "native")
    build_kernels(SilentProgress())
    assert diagnose().cuda == LibraryState(str(build.find_library("cuda")), "", "native")


def test_a_library_that_does_not_load_is_reported(make_compiler, monkeypatch):
    see_gpus(monkeypatch)
    make_compiler()
    message = f"{build.build_library('cpu')} cannot be loaded"
    found = diagnose().cpu
    assert (found.path, found.backend) == (None, "reference")
    assert found.note.startswith(message)
    assert_no_build("cpu", message)


def test_a_gpu_has_a_library_of_its_own_or_none_and_does_not_hinder_the_others(
    make_compiler, monkeypatch, kernels, simulated
):
    make_compiler(library=kernels)
    make_compiler("nvcc", probe="printf 'compute_75\\ncompute_90\\n'", library=simulated.path)
    see_gpus(monkeypatch, (9, 0), (7, 5))
    shared = build.build_library("cuda")
    # 0 is success
    monkeypatch.setattr(DeviceLibrary, "_status", lambda self, device: int(device == 1 and self.path == shared))
    assert library.device_library(0).path == shared
    own = library.device_library(1).path
    assert own == build.find_library("cuda", architectures=("75",)) != shared
    monkeypatch.setattr(DeviceLibrary, "_status", lambda self, device: device)
    library.device_library.cache_clear()
    assert diagnose().cuda == LibraryState(str(shared), "", "native")
    messages = Recorder()
    build_kernels(messages)
    compiling, note = messages.said
    assert compiling == "compiling the cpu kernels"
    assert note.startswith(f"note: {own} does not run on cuda:1: ")
    monkeypatch.setattr(DeviceLibrary, "_status", lambda self, device: 1)
    library.device_library.cache_clear()
    assert_no_build("cuda", "does not run on cuda:0")
    found = diagnose().cuda
    assert (found.path, found.backend) == (None, "native, on the host")
    assert "does not run on cuda:0" in found.note
