"""Return the main memory of gathered parameters to the operating system."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of the two settings in glibc's malloc.h."""
LARGE = 16 * 2**20
"""Bytes from which a block is returned at once."""


def return_large_blocks() -> None:
    """Make glibc return blocks of 16 MiB and more to the system as soon as they are freed.

    On a CPU every gather allocates and frees such blocks. By default glibc soon keeps freed blocks of up to 32 MiB, and
    small allocations fragment them: resident memory then grows beyond that of replication. Without glibc, does
    nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_TRIM_THRESHOLD, 2 * LARGE)  # glibc's own ratio of the two
