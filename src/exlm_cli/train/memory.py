"""Memory that tensors on a CPU have left behind and the C library keeps."""

import ctypes
import functools
from collections.abc import Callable


def release_freed_memory() -> None:
    """Give the pages of freed tensors back to the system; nothing happens where the C library is not glibc.

    A step frees tensors of many sizes, and glibc keeps what lies between those that stay. These holes grow: by 40 MB a
    step of 64 sequences of 512 expanded tokens, to ten times what the step needs (docs/results.md).
    """
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return lambda _pad: None
    return trim
