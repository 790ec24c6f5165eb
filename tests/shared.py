"""Folders that tests only read, each made once for all workers of pytest-xdist."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of this name, which `make` has filled: here, or in the worker that needed it first."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # that of all workers
    folder, done = root / f"shared-{name}", root / f"shared-{name}.done"
    with filelock.FileLock(root / f"shared-{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
