"""The main function of a rank's process, and the files in which it reports its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from distcore.files import write_atomically
from distcore.launchers.processes.failures import Failure, exit_now, run_and_record
from distcore.launchers.processes.log_files import log_to_file
from distcore.launchers.processes.start_method import die_with

T = TypeVar("T")


def rank_main(fn: Callable[[], T], errors: Path, records: Path, parent: int) -> T | None:
    """Run ``fn`` as this rank and return its result; a failure is recorded in a file and ends the process.

    ``errors`` is the folder for tracebacks, ``records`` the one for reports to the parent, whose process id is
    ``parent``.
    """
    _prepare_process(parent)
    rank = int(os.environ["RANK"])
    log_to_file(rank)
    outcome = run_and_record(fn, rank, errors)
    if isinstance(outcome, Failure):
        write_atomically(records / f"failed-{rank}.json", json.dumps(asdict(outcome)))
        exit_now(outcome.exit_code)
    write_atomically(records / f"finished-{rank}", "")
    return outcome


def is_finished(records: Path, rank: int) -> bool:
    """Return True if ``rank`` has returned from its function."""
    return (records / f"finished-{rank}").exists()


def read_failures(records: Path) -> dict[int, Failure]:
    """Return the failures that ranks have recorded, by rank."""
    failures = (Failure(**json.loads(file.read_text())) for file in records.glob("failed-*.json"))
    return {failure.rank: failure for failure in failures}


def _prepare_process(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to every process; the parent ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    die_with(parent)
    with contextlib.suppress(KeyError, ValueError):
        # torch read OMP_NUM_THREADS when it was loaded, which in a forked rank was before it was set.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
