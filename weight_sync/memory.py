"""How the C library keeps memory: the one setting of a process that moves tensors.

Owns that setting.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Lets glibc's malloc reuse freed buffers of up to 32 MB instead of returning them.

    By default it gives each of them back to the kernel and has the next one faulted in anew, page
    by page, which takes longer than what is done with a megabyte of weights in between.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 20)
