"""What a process does that was started as a rank, and how it tells its supervisor the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from distcore.files import write_whole
from distcore.launchers.failures import Failure, attempt, leave

T = TypeVar("T")

PR_SET_PDEATHSIG = 1


def serve(fn: Callable[[], T], errors: Path, records: Path, parent: int) -> T | None:
    """Run ``fn`` as this rank and return what it returns; a failure is recorded and ends the process."""
    _settle_in(parent)
    rank = int(os.environ["RANK"])
    outcome = attempt(fn, rank, errors)
    if isinstance(outcome, Failure):
        write_whole(records / f"failed-{rank}.json", json.dumps(asdict(outcome)))
        leave(outcome.exit_code)
    write_whole(records / f"finished-{rank}", "")
    return outcome


def is_finished(records: Path, rank: int) -> bool:
    """Whether ``rank`` has returned from its function."""
    return (records / f"finished-{rank}").exists()


def read_failures(records: Path) -> dict[int, Failure]:
    """What failed ranks have told, by rank."""
    failures = (Failure(**json.loads(file.read_text())) for file in records.glob("failed-*.json"))
    return {failure.rank: failure for failure in failures}


def _settle_in(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # kill -9 of the parent leaves no orphan
        if os.getppid() != parent:  # it died before that
            leave(1)
    with contextlib.suppress(KeyError, ValueError):
        # A forked torch has read OMP_NUM_THREADS long ago.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
