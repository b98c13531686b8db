"""The main function of a rank's process, and the files in which it reports its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from distcore.files import write_atomically
from distcore.launchers.processes.failures import Failure, exit_now, one_line, run_and_record
from distcore.launchers.processes.log_files import log_to_file
from distcore.launchers.processes.start_method import die_with

T = TypeVar("T")

RECORDS = "DISTCORE_RANK_RECORDS"
"""Environment variable of a rank with the folder of its reports to the launcher."""


def rank_main(fn: Callable[[], T], errors: Path, records: Path, parent: int) -> T | None:
    """Run ``fn`` as this rank and return its result; a failure is recorded in a file
    and ends the process.

    ``errors`` is the folder for tracebacks, ``records`` the one for reports to the parent, whose
    process id is ``parent``.
    """
    _prepare_process(parent)
    os.environ[RECORDS] = str(records)
    rank = int(os.environ["RANK"])
    log_to_file(rank)
    outcome = run_and_record(fn, rank, errors)
    if isinstance(outcome, Failure):
        write_atomically(records / f"failed-{rank}.json", json.dumps(asdict(outcome)))
        exit_now(outcome.exit_code)
    write_atomically(records / f"finished-{rank}", "")
    return outcome


@contextmanager
def outliving_peers() -> Iterator[None]:
    """Have distcore's launcher wait for this rank where a signal has killed another one: it may
    save what it holds.
    """
    mark = (
        Path(os.environ[RECORDS], f"outlives-{os.environ['RANK']}")
        if RECORDS in os.environ
        else None
    )
    if mark:
        mark.touch()
    try:
        yield
    finally:
        if mark:
            mark.unlink(missing_ok=True)


def outlives_peers(records: Path, rank: int) -> bool:
    """Return True if ``rank`` may be saving what it holds."""
    return (records / f"outlives-{rank}").exists()


def have_failed_by_themselves() -> bool:
    """Return True if a rank of this machine has reported an error of its own; a record comes before
    the end of it.
    """
    failures = read_failures(Path(os.environ[RECORDS])) if RECORDS in os.environ else {}
    return any(failure.kind == "error" for failure in failures.values())


def record_killed(rank: int, cause: str) -> None:
    """Have distcore's launcher say ``cause`` of a rank of this machine that is about to be ended,
    as if by a signal.

    Its peers have not failed, and may save what they hold.
    """
    if RECORDS in os.environ:
        cause = one_line(cause)
        failure = Failure(rank=rank, kind="signal", cause=cause, when=time.time())
        record = Path(os.environ[RECORDS], f"failed-{rank}.json")
        write_atomically(record, json.dumps(asdict(failure)))


def is_finished(records: Path, rank: int) -> bool:
    """Return True if ``rank`` has returned from its function."""
    return (records / f"finished-{rank}").exists()


def read_failures(records: Path) -> dict[int, Failure]:
    """Return the failures that ranks have recorded, by rank."""
    failures = {}
    for file in records.glob("failed-*.json"):
        failure = Failure(**json.loads(file.read_text()))
        failures[failure.rank] = failure
    return failures


def _prepare_process(parent: int) -> None:
    """Set signals and threads of a new rank; it ends with its parent."""
    # A terminal sends Ctrl-C to every process; the parent ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as Ctrl-C
    die_with(parent)
    with contextlib.suppress(KeyError, ValueError):
        # torch read OMP_NUM_THREADS when it was loaded, which in a forked rank was before
        # it was set.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
