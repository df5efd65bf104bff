"""A word with the C library's allocator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


def return_freed_memory() -> None:
    """Give freed heap pages back to the system.

    The GNU C library before 2.38 does not reuse a freed block for an aligned block of the same size, so that a loop over
    panels of equal size would grow the process by a few megabytes a panel. Elsewhere this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
