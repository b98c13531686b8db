"""Return the memory of large tensors on a CPU to the operating system when they are freed."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of the two settings in glibc's malloc.h."""
LARGE = 16 * 2**20
"""Bytes from which a block is large while a model trains: activations that went back would cost page faults."""


def return_large_blocks(size: int = LARGE) -> None:
    """Make glibc return blocks of ``size`` bytes and more to the system as soon as they are freed.

    For a strategy that holds parts of tensors: on a CPU every gather allocates and frees such blocks. By default glibc
    soon keeps freed blocks of up to 32 MiB, and small allocations fragment them: resident memory then grows beyond that
    of replication. Holds for what is allocated from now on. Without glibc, does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, size)
        mallopt(M_TRIM_THRESHOLD, 2 * size)  # glibc's own ratio of the two
