"""`exlm doctor`: what it shows, for people and for programs, and how a build that fails ends."""

import pytest

from exlm_cli.ops.alignment import build
from tests.cli.asserts import printed_by, refusal_of, result_of


def test_the_kernels_in_use_are_shown(folder, capsys):
    for built in (folder.parent / "cache").iterdir():
        built.unlink()
    found = result_of(capsys, "doctor")
    assert set(found) == {"torch", "processor", "gpus", "compiler", "nvcc", "cache", "cpu", "cuda"}
    assert found["cache"] == str(folder.parent / "cache")
    assert found["cpu"] == {
        "path": None,
        "note": "compiled at the first use, or now by `exlm doctor --build`",
        "backend": "native",
    }
    lines = printed_by(capsys, ["doctor"]).out.splitlines()
    assert f"cache         {found['cache']}" in lines
    assert "CPU backend   native" in lines


@pytest.mark.usefixtures("folder")
def test_a_build_that_fails_says_why_and_exits_with_2(capsys, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert refusal_of(capsys, "doctor", "--build") == (
        "error: the native cpu kernels are not available: no C++ compiler found (g++, c++ or clang++)\n"
        "hint: training works without them, slower: the `reference` backend needs no compiler"
    )
