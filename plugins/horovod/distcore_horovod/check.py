"""``distcore-horovod check``: two processes start, connect and all-reduce
with the installed Horovod.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import torch

from distcore import DistcoreError, RankInfo, launch

PROCESSES = 2
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def main() -> int:
    """Print the sums; return the exit code: 0 if they are right, else 2."""
    try:
        # If Horovod is missing, the error names the build command.
        from distcore_horovod import library  # noqa: F401

        sums = launch(add_ranks, nproc=PROCESSES, timeout=60)
    except (DistcoreError, ImportError) as error:
        print(f"error: {error}")
        return 2
    wanted = sum(range(1, PROCESSES + 1))
    is_right = sums == [wanted] * PROCESSES
    judgment = "as expected" if is_right else f"not to {wanted} on each: its build is broken"
    print(f"horovod {version('horovod')}: {PROCESSES} processes all-reduced to {sums}, {judgment}")
    return 0 if is_right else 2


def add_ranks() -> float:
    """Return the sum of the rank numbers over all ranks, counted from 1."""
    from distcore_horovod.collectives import sum_over_ranks
    from distcore_horovod.library import hvd
    from distcore_horovod.rendezvous import connect

    connect(rank_info_from_environment(), timeout=30)
    number = torch.tensor([hvd.rank() + 1.0], dtype=torch.float64)
    total = sum_over_ranks(number).item()
    hvd.shutdown()
    return float(total)


def rank_info_from_environment() -> RankInfo:
    """Return the rank info of a process that ``distcore.launch`` has started."""
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in NAMES)
    return RankInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


if __name__ == "__main__":
    raise SystemExit(main())
