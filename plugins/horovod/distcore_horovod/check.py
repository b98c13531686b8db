"""``distcore-horovod check``: two processes start, meet and all-reduce with the installed Horovod."""

from __future__ import annotations

import os
from importlib.metadata import version

import torch

from distcore import DistcoreError, Place, launch

PROCESSES = 2


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

    connect(Place(**{field: int(os.environ[name]) for field, name in FIELDS.items()}), timeout=30)
    result = total(torch.tensor([hvd.rank() + 1.0], dtype=torch.float64)).item()
    hvd.shutdown()
    return float(result)


FIELDS = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}

if __name__ == "__main__":
    raise SystemExit(main())
