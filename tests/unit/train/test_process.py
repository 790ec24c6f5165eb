"""Freed pages go back to the system; CUDA's memory may grow in place; the second signal ends a run at once."""

import ctypes
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from exlm_cli.errors import RankError
from exlm_cli.train import process
from exlm_cli.train.pretrained import pick_device
from tests.tiny import tiny_recipe

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_holes_between_tensors_are_given_back():
    # glibc alone: 64 KiB come from the heap, and every second one that stays keeps the heap from shrinking by itself
    tensors = [torch.full((1 << 14,), float(n)) for n in range(2048)]
    kept = tensors[::2]
    del tensors
    before = resident_bytes()
    process.FreedMemory().release()
    assert before - resident_bytes() > 48 * MIB
    assert all(bool((tensor == 2 * n).all()) for n, tensor in enumerate(kept))


def test_memory_is_given_back_once_it_is_half_as_large_again_as_after_a_first_step(monkeypatch):
    pages, given_back_at = iter([100, 149, 151, 80, 120, 121]), []
    monkeypatch.setattr(process, "_resident_pages", lambda: next(pages))
    monkeypatch.setattr(process, "_trim", lambda: given_back_at.append)
    memory = process.FreedMemory()
    seen = []
    for _ in range(6):
        memory.after_step()
        seen.append(len(given_back_at))
    assert seen == [0, 0, 1, 1, 1, 2]


EXPANDS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("given", "release", "expected"),
    [
        ({}, "6.8.0-45-generic", EXPANDS),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "6.8.0-45-generic", None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "6.8.0-45-generic", None),
        ({}, "5.15.167.4-microsoft-standard-WSL2", None),
        ({}, "5.15.148-tegra", None),
    ],
)
def test_memory_of_cuda_grows_in_place_unless_the_user_or_the_driver_refuses(monkeypatch, given, release, expected):
    before = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    monkeypatch.setattr(os, "environ", before | given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process.platform, "release", lambda: release)
    assert pick_device(tiny_recipe(device="cuda")).type == "cuda"
    assert os.environ == before | given | (expected or {})


def test_a_closed_terminal_stops_a_run_but_not_one_under_nohup(monkeypatch):
    is_terminal, redirect = Mock(return_value=True), Mock()
    monkeypatch.setattr(os, "isatty", is_terminal)
    monkeypatch.setattr(os, "dup2", redirect)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with process.StopSignal() as stop:
            is_terminal.return_value = False
            for _ in range(2):  # the shell and the kernel
                os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == signal.SIGHUP
        assert [told.args[1] for told in redirect.call_args_list] == [1, 2]  # a write would be an error
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with process.StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_acts_as_usual_and_handlers_come_back():
    usual = signal.default_int_handler
    of_worker = signal.signal(signal.SIGINT, usual)  # a worker of pytest-xdist ignores the signal
    try:
        with process.StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.number == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        with process.StopSignal():
            assert signal.getsignal(signal.SIGINT) != usual
        assert signal.getsignal(signal.SIGINT) is usual
    finally:
        signal.signal(signal.SIGINT, of_worker)


def test_the_signal_by_which_torchrun_ends_a_rank_does_not_come_before_the_error_of_a_lost_one():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RankError), process.StopSignal():
            raise RankError("another rank does not answer", "continue", 0)
        os.kill(os.getpid(), signal.SIGTERM)  # this process goes on
        assert signal.getsignal(signal.SIGTERM) == before  # and a second one ends it
    finally:
        signal.signal(signal.SIGTERM, before)
