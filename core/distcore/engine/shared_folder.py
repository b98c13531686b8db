"""Check before training that all ranks have the same run folder."""

from __future__ import annotations

import socket
import time
from functools import partial
from pathlib import Path
from uuid import uuid4

from distcore.distributed.agreement import broadcast_from_main, on_all_ranks
from distcore.errors import CheckpointError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks

PATIENCE = 10.0
"""Seconds for a new file to appear on other machines: network file systems cache its absence."""


def check_shared(run: Run, hooks: Hooks) -> None:
    """Raise CheckpointError unless all ranks see a file that rank 0 writes to the run folder.

    Every rank calls. Ranks without a shared folder would otherwise fail at their first checkpoint.
    """
    out = Path(str(run.config.out))
    file = out / broadcast_from_main(run, hooks, f".seen-by-all-{uuid4().hex}")
    is_new = run.world.is_main and not out.exists()
    write = partial(_write, file, run.world.is_main)
    look = partial(_look, file, run.world.rank)
    on_all_ranks(run, hooks, f"run folder {out} cannot be written", write)
    try:
        on_all_ranks(run, hooks, f"run folder {out}", look)
    finally:
        if run.world.is_main:
            file.unlink(missing_ok=True)
            if is_new and not any(out.iterdir()):
                out.rmdir()  # a run that is refused leaves nothing behind


def _write(file: Path, is_main: bool) -> None:
    if is_main:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def _look(file: Path, rank: int) -> None:
    """Wait until this rank sees the file; raises CheckpointError if it does not."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"out = {str(file.parent)!r}: rank {rank} on {socket.gethostname()} does not see"
                " there what rank 0 writes: --out must be one folder for all machines, on a disk"
                " that they share"
            )
        time.sleep(0.1)
