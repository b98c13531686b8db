"""How many CPU cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1: by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_quota())))


def cgroup_quota(root: Path = Path("/")) -> float:
    """Return how many cores the cgroup of this process may use at a time; infinite where there is no limit.

    ``root`` stands for the file system. Reads version 2, and of version 1 what a container sees.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError):  # not Linux, or not mounted
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        for group in (Path(own), *Path(own).parents):  # a limit holds for all groups below
            with contextlib.suppress(OSError):
                quotas.append(_cores(*(root / "sys/fs/cgroup" / group / "cpu.max").read_text().split()))
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quotas.append(_cores(*((root / "sys/fs/cgroup/cpu" / name).read_text().strip() for name in names)))
    return min(quotas)


def _cores(quota: str, period: str) -> float:
    """Return the cores of a quota in microseconds of computing per period; ``max`` and -1 stand for no limit."""
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
