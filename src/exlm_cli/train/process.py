"""The training process: a flag set by the first Ctrl-C or SIGTERM, and the release of freed memory."""

import ctypes
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignal:
    """While entered, the first SIGINT or SIGTERM sets `number`; a second one acts as usual.

    Does nothing outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


def release_freed_memory() -> None:
    """Give the pages of freed tensors back to the system; do nothing where the C library is not glibc.

    A step frees tensors of many sizes, and glibc keeps the gaps between those that stay. The gaps grow by 40 MB a step
    of 64 sequences of 512 expanded tokens, to ten times what the step needs (docs/lab_notes/step_cost.md).
    """
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return lambda _pad: None
    return trim
