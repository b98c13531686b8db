"""Return the memory of large tensors on a CPU to the operating system when they are freed."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of the two settings in glibc's malloc.h."""
LARGE = 16 * 2**20
"""Smallest large block, in bytes: to return smaller ones, such as activations, costs page faults.
"""


def return_large_blocks(size: int = LARGE) -> None:
    """Make glibc return blocks of ``size`` bytes and more to the system as soon as they are freed.

    A sharding strategy allocates and frees such blocks in every gather on a CPU. glibc's default
    keeps freed blocks of up to 32 MiB, and small allocations fragment them, until resident memory
    exceeds that of replication. Applies to later allocations. Does nothing without glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, size)
        mallopt(M_TRIM_THRESHOLD, 2 * size)  # glibc's own ratio of the two
