"""Versions and the commit, as git and the package's own metadata tell them."""

import subprocess
from pathlib import Path

import pytest

from exlm_cli import run_dir as environment
from exlm_cli.run_dir import package_version, source_commit


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert package_version("exlm-no-such-distribution") is None


def test_the_commit_is_that_of_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(environment.__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    if asked.returncode:
        assert source_commit() is None
    else:
        assert (source_commit() or "").removesuffix("-dirty") == asked.stdout.strip()
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    assert source_commit() is None


def test_a_package_inside_somebody_elses_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "environment.py").touch()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    assert source_commit() is None
