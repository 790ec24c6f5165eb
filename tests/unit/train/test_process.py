"""Freed pages go back to the system; what is in use stays as it is."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exlm_cli.train import process

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    process._trim.cache_clear()
    yield
    process._trim.cache_clear()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_holes_between_tensors_are_given_back():
    # glibc alone: 64 KiB come from the heap, and every second one that stays keeps the heap from shrinking by itself
    tensors = [torch.full((1 << 14,), float(n)) for n in range(2048)]
    kept = tensors[::2]
    del tensors
    before = resident_bytes()
    process.release_freed_memory()
    assert before - resident_bytes() > 48 * MIB
    assert all(bool((tensor == 2 * n).all()) for n, tensor in enumerate(kept))


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    process.release_freed_memory()
