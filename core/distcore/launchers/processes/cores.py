"""The cores of this machine: computing threads per rank, and a warning if ranks must share cores.

The number of threads depends on the machine alone, never on its load. It changes the rounding of
sums, and a repeated run must end with the same numbers.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import torch

from distcore.config import RunConfig


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1: by its affinity
    and its cgroup's quota.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, int(min(cores, cgroup_quota())))


def cgroup_quota(root: Path = Path("/")) -> float:
    """Return the number of cores that this process's cgroup may use at a time;
    infinite without a limit.

    ``root`` is the root of the file system. Reads version 2, and version 1 as a container sees it.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError):  # not Linux, or not mounted
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        lines_of_version_2 = [line for line in lines if line.startswith("0::/")]
        own_group = Path(*[line.removeprefix("0::/") for line in lines_of_version_2[:1]])
        # A limit holds for all groups below.
        for group in (own_group, *own_group.parents):
            with contextlib.suppress(OSError):
                limit = (root / "sys/fs/cgroup" / group / "cpu.max").read_text()
                quota, period = limit.split()
                quotas.append(_cores(quota, period))
        folder_of_version_1 = root / "sys/fs/cgroup/cpu"
        quota = (folder_of_version_1 / "cpu.cfs_quota_us").read_text().strip()
        period = (folder_of_version_1 / "cpu.cfs_period_us").read_text().strip()
        quotas.append(_cores(quota, period))
    return min(quotas)


def _cores(quota: str, period: str) -> float:
    """Return a cgroup's limit as a number of cores; infinite if it says that there is none."""
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def threads_per_rank(ranks: int) -> int:
    """Return the computing threads of each of ``ranks`` on this machine: OMP_NUM_THREADS, or a
    share of the cores.

    A single rank takes torch's default, mostly one thread per physical core, but never
    more than its cores.
    """
    if chosen := threads_chosen():
        return chosen
    return (
        max(1, available_cores() // ranks)
        if ranks > 1
        else min(torch.get_num_threads(), available_cores())
    )


def threads_chosen() -> int:
    """Return the threads that the user has chosen by OMP_NUM_THREADS, 0 if none."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdigit() else 0


def keep_to_cores() -> None:
    """Reduce torch's threads to the cores of this process. torch ignores, for
    example, a container's quota.

    A user's OMP_NUM_THREADS is kept.
    """
    torch.set_num_threads(min(threads_per_rank(1), torch.get_num_threads()))


def crowding_warning(config: RunConfig) -> str | None:
    """Return a warning, one line, if a resolved config starts more ranks than there are
    cores; ``None`` if not.
    """
    ranks = int(config.nproc)
    cores = available_cores()
    if config.device != "cpu" or ranks <= cores:
        return None
    # The rows of a step must split evenly over the ranks.
    sizes = [size for size in range(1, cores + 1) if config.global_batch_size % size == 0]
    fewer = max(sizes)
    return (
        f"nproc = {ranks} on {cores} core(s): ranks take turns on them, and each step waits for the"
        f" last one; --nproc {fewer} gives each a core of its own"
    )
