"""Folders that tests only read, each made once for all processes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled: now, or in the process that needed it first."""
    done = folder.with_suffix(".done")
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of this name of all workers of pytest-xdist."""
    root = factory.getbasetemp()
    return made_once((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"shared-{name}", make)
