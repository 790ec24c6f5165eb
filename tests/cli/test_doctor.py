"""`exlm doctor`: what it shows, for people and for programs, and how a build that fails ends."""

from exlm_cli.ops.alignment import build
from tests.cli.asserts import printed_by, refusal_of, result_of


def test_the_kernels_in_use_are_shown_and_a_build_that_fails_says_why(folder, capsys, monkeypatch):
    for built in (folder.parent / "cache").iterdir():
        built.unlink()
    found = result_of(capsys, "doctor")
    assert set(found) == {"torch", "processor", "gpus", "compiler", "nvcc", "cache", "cpu", "cuda"}
    assert found["cache"] == str(folder.parent / "cache")
    note = "compiled at the first use, or now by `exlm doctor --build`"
    assert found["cpu"] == {"path": None, "note": note, "backend": "native"}
    assert "CPU backend   native" in printed_by(capsys, ["doctor"]).out.splitlines()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert "no C++ compiler found" in refusal_of(capsys, "doctor", "--build")
