"""``distcore-horovod check``: two processes start, meet and all-reduce with the installed Horovod."""

from __future__ import annotations

import os
from importlib.metadata import version

import torch

from distcore import DistcoreError, RankInfo, launch

PROCESSES = 2
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def main() -> int:
    """Print what came out; return the exit code."""
    try:
        from distcore_horovod import library  # noqa: F401  # names the build command where Horovod is missing

        sums = launch(add_ranks, nproc=PROCESSES, timeout=60)
    except (DistcoreError, ImportError) as error:
        print(f"error: {error}")
        return 2
    wanted = sum(range(1, PROCESSES + 1))
    print(f"horovod {version('horovod')}: {PROCESSES} processes all-reduced to {sums}, expected {wanted} on each")
    return 0 if sums == [wanted] * PROCESSES else 2


def add_ranks() -> float:
    """Return the sum over ranks of their numbers, counted from 1."""
    from distcore_horovod.library import hvd
    from distcore_horovod.rendezvous import connect
    from distcore_horovod.wire import total

    connect(here(), timeout=30)
    result = total(torch.tensor([hvd.rank() + 1.0], dtype=torch.float64)).item()
    hvd.shutdown()
    return float(result)


def here() -> RankInfo:
    """The place of a rank that ``distcore.launchers`` has started."""
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in NAMES)
    return RankInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


if __name__ == "__main__":
    raise SystemExit(main())
