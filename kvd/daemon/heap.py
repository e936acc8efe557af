"""How the C library's heap of the daemon behaves: what prompts leave behind is kept for the next.

Prompts come and go in frames of tens of kilobytes. By default glibc gives the end of the heap back
to the kernel as soon as 128 KiB are free there, and takes it again, page fault by page fault, for
the next prompt: 6 faults a request. Keeping it costs address space and at most ``KEPT_BYTES`` of
memory, and saves 10 to 15 % of the CPU of a lease cycle of 13k tokens.

And Python's: what was made while the daemon came up stays until its end, so no collection looks at
it. A full one took up to 27 ms, in which nobody was answered, most of it for modules and classes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

KEPT_BYTES = 64 * 1024 * 1024
"""Free memory at the end of the heap that is not given back."""

GROWTH_BYTES = 4 * 1024 * 1024
"""What is asked of the kernel at a time."""

LARGE_BYTES = 16 * 1024 * 1024
"""From this size on a block is a mapping of its own: the longest frame, not every long prompt."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Tell glibc; another C library keeps its own ways."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_TOP_PAD, GROWTH_BYTES)
    mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Give the kernel what is free now, wherever it lies; takes some milliseconds."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def spare_what_stays() -> None:
    """Leave everything that there is now out of every collection to come."""
    gc.freeze()
