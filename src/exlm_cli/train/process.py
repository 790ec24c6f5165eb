"""The training process: a flag set by the first Ctrl-C, SIGTERM or SIGHUP, and its memory."""

import ctypes
import functools
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from exlm_cli.errors import RankError

_MOST_GROWTH = 1.5
"""Growth of resident memory that triggers a release, relative to the first step after the last release."""


class StopSignal:
    """While entered, the first SIGINT, SIGTERM or SIGHUP sets `number`; a second SIGINT or SIGTERM acts as usual.

    A terminal that closes sends SIGHUP, its shell perhaps another one, and what is written to it is lost from then on.
    A process under `nohup` ignores the signal and goes on. Does nothing outside the main thread, where Python allows no
    handlers.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, Any] = {}
        self._terminals = [output for output in (1, 2) if os.isatty(output)]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # torchrun sends SIGTERM when a rank has died: the others first say why they end
        if kind is None or not issubclass(kind, RankError):
            self._restore()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        if number == signal.SIGHUP:
            self._previous[number] = signal.signal(number, signal.SIG_IGN)
            for output in self._terminals:
                if not os.isatty(output):  # closed: a write would raise an error before the checkpoint is saved
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


class FreedMemory:
    """Releases memory of freed tensors to the system when resident memory has grown by half since the last release.

    A step frees tensors of many sizes, and glibc keeps the gaps between the remaining ones. With 64 sequences of 512
    expanded tokens the gaps grow by up to 40 MB a step, to ten times what a step needs. A release costs page faults
    in the next steps: 3 to 6 % of a small recipe's time if done every ten steps (docs/lab_notes/step_cost.md).
    Does nothing without glibc.
    """

    def __init__(self) -> None:
        self._needed_pages = 0

    def after_step(self) -> None:
        """Release the memory if it has grown too much."""
        resident = _resident_pages()
        self._needed_pages = self._needed_pages or resident
        if resident > _MOST_GROWTH * self._needed_pages:
            self.release()

    def release(self) -> None:
        """Release the memory now."""
        _trim()(0)
        self._needed_pages = 0


def let_segments_expand() -> None:
    """Let torch's memory on CUDA grow in place, so that batches of many sizes leave no gaps that none of them fits.

    torch reads the variable when it first takes memory of a device. It stays as the user has set it, and unset where
    the driver refuses to map memory so: under WSL 2 and on a Jetson.
    """
    is_set = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    refuses = any(word in platform.release().lower() for word in ("microsoft", "tegra"))
    if sys.platform == "linux" and not is_set and not refuses:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _resident_pages() -> int:
    """Return the pages of this process in memory; 0 where /proc does not exist."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        return 0


@functools.cache
def _trim() -> Callable[[int], object]:
    trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _pad: None)
    return trim
