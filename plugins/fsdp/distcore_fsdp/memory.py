"""Main memory that gathered parameters leave behind."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 16 * 2**20


def return_large_blocks() -> None:
    """Have the C library return blocks of 16 MiB and more to the system as soon as they are freed.

    Every gather on a CPU takes such blocks and frees them. glibc by itself soon keeps blocks of up to 32 MiB, cut up
    by small ones that stay: resident memory then grows beyond what replication would take. Does nothing elsewhere.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_TRIM_THRESHOLD, 2 * LARGE)  # the ratio that glibc itself keeps
