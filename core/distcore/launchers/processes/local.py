"""Start ranks on this machine through torchelastic's process API, and end them together.

The calling process is the supervisor: it hosts the ranks' store on a loopback port, reads the exit
code of every rank, and reports the first failure. torchelastic's agent is not used: it would add a
rendezvous between machines.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

# public, but not re-exported by name
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from distcore.distributed.process_group import drop_leftover_group
from distcore.errors import ConfigError, RankError, StoppedError
from distcore.launchers.processes.contexts import (
    errors_folder,
    handle_stop_signals,
    raise_on_sigterm,
    rank_environment,
    set_missing_variables,
    shared_environment,
    silence_torchelastic,
)
from distcore.launchers.processes.failures import (
    WAIT_FOR_CULPRIT,
    Failure,
    aborted_in,
    culprit,
    traceback_file,
)
from distcore.launchers.processes.memory_kills import oom_kills
from distcore.launchers.processes.rank import is_finished, outlives_peers, rank_main, read_failures
from distcore.launchers.processes.start_method import check_spawnable, start_method
from distcore.plugin.strategy.contract import LOOPBACK

T = TypeVar("T")

POLL = 0.03
"""Seconds between two checks of the ranks."""
WAIT_FOR_SURVIVORS = 60
"""Most seconds to wait for ranks that outlive another one. Over gloo they lose its
connection as it dies.
"""
CAN_SEE_DEATHS = hasattr(os, "waitid")
"""True if exit codes can be read without reaping the process; False on macOS before Python 3.13."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    entry: Callable[[], object]
    """The function of each rank."""
    nproc: int
    """Number of ranks."""
    errors: Path
    """Folder for tracebacks."""
    records: Path
    """Private folder for the files in which ranks report how they ended."""
    deadline: float
    """End of the time limit, on the clock of ``time.monotonic``."""
    stop: threading.Event
    """Set when the caller no longer waits, for example after Ctrl-C."""
    signals: list[int]
    """SIGTERM or the first Ctrl-C, when SIGTERM is to be sent to the ranks."""
    grace_period: float
    """Seconds that ranks get to end after SIGTERM."""
    oom_kills_before: int | None = field(default_factory=oom_kills)
    """Processes that the kernel had ended for want of memory before the ranks were started."""


def run_ranks(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    nproc: int,
    errors: Path | None,
    timeout: float | None,
    grace_period: float,
) -> list[T]:
    """Implement ``distcore.launchers.launch``, which documents arguments and exceptions."""
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: expected a number of processes, 1 or more")
    if sys.platform == "win32":
        raise ConfigError(
            f"--nproc {nproc}: ranks cannot be started on Windows; use --nproc 1, or WSL"
        )
    drop_leftover_group()
    with ExitStack() as stack:
        job = _Launch(
            entry=partial(fn, *args),
            nproc=nproc,
            errors=stack.enter_context(errors_folder(errors)),
            records=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distcore-"))),
            deadline=time.monotonic() + timeout if timeout else float("inf"),
            stop=threading.Event(),
            signals=[],
            grace_period=grace_period,
        )
        stack.enter_context(
            handle_stop_signals(job.signals.append) if grace_period else raise_on_sigterm()
        )
        return _run_in_thread(partial(_supervise, job), job.stop)


def _run_in_thread(work: Callable[[], T], stop: threading.Event) -> T:
    """Run ``work`` in a new thread and return its result; an exception while waiting sets
    ``stop`` and joins it.

    ``work`` forks, so it needs a new thread. OpenMP keeps a pool of workers for each thread with a
    parallel region. A fork does not copy the workers, so a child with an inherited pool would hang.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="distcore-launch")
    thread.start()
    try:
        return future.result()
    finally:
        stop.set()
        thread.join()


def _supervise(job: _Launch) -> list[Any]:
    """Start the ranks, watch them, and return their results; raise for the rank that failed."""
    with ExitStack() as stack:
        # All ranks may connect before the store is there to accept.
        backlog = job.nproc + 16
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=backlog))
        stack.enter_context(silence_torchelastic())
        stack.enter_context(set_missing_variables(shared_environment(job.nproc)))
        ranks = _start_ranks(job, listener.getsockname()[1])
        stack.callback(ranks.close, signal.SIGTERM, 1)  # second before SIGKILL
        # Created after the fork, which would not copy the store's thread; ranks that connect
        # earlier wait in the socket's backlog. The socket is ours, because TCPStore's own would
        # listen on every network interface.
        store = TCPStore(
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=os.dup(listener.fileno()),
        )
        try:
            return _wait(job, ranks)
        finally:
            # else a traceback keeps it alive, and a rank of the next launch crashes
            # when it frees it
            del store


def _start_ranks(job: _Launch, port: int) -> PContext:
    """Start a process for each rank; their store listens on ``port`` of this machine."""
    arguments = (job.entry, job.errors, job.records, os.getpid())
    method = start_method()
    if method == "spawn":
        check_spawnable(job.entry)
    # A forked rank must not free what it inherits: a process group that is garbage here would wait
    # for its threads, which a fork does not copy, or crash.
    gc.freeze()
    ranks = range(job.nproc)
    try:
        return start_processes(
            name="rank",
            entrypoint=rank_main,
            args=dict.fromkeys(ranks, arguments),
            envs={rank: rank_environment(rank, job.nproc, port) for rank in ranks},
            logs_specs=DefaultLogsSpecs(log_dir=str(job.records)),
            start_method=method,
        )
    finally:
        gc.unfreeze()


def _wait(job: _Launch, ranks: PContext) -> list[Any]:
    """Return the ranks' results when all have finished; raise for the first that fails.

    A signal is passed on to the ranks, which then have the grace period to save and end.
    """
    pids = ranks.pids()
    deadline = job.deadline
    passed_on = False
    while not job.stop.wait(POLL):
        if job.signals and not passed_on:
            passed_on = True
            deadline = min(deadline, time.monotonic() + job.grace_period)
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):  # the rank has ended
                    os.kill(pid, signal.SIGTERM)
        dead = _exit_codes(pids)
        if dead:
            _raise_for(job, _wait_for_culprit(job, pids, dead))
        # torchelastic ends all ranks at the first death that it sees, before the cause is known. So
        # it is asked only after all ranks have finished, except where there is no other way to see
        # a death.
        ask_torchelastic = not CAN_SEE_DEATHS or all(
            is_finished(job.records, rank) for rank in pids
        )
        result = ranks.wait(0) if ask_torchelastic else None
        if result is not None and not result.is_failed():
            return [result.return_values[rank] for rank in range(job.nproc)]
        if result is not None:
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            _raise_for(job, _failures(job, codes))
        if time.monotonic() > deadline:
            if passed_on:
                raise SystemExit(128 + job.signals[0])
            raise RankError(
                f"{job.nproc} rank(s) did not end within their time limit and were stopped"
            )
    raise RankError("stopped")


def _exit_codes(pids: dict[int, int]) -> dict[int, int]:
    """Return the exit codes of dead ranks, negative for a signal, without reaping
    them: torchelastic does that.
    """
    dead: dict[int, int] = {}
    for rank, pid in pids.items() if CAN_SEE_DEATHS else ():
        with contextlib.suppress(ChildProcessError):
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                dead[rank] = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
    return dead


def _wait_for_culprit(job: _Launch, pids: dict[int, int], dead: dict[int, int]) -> list[Failure]:
    """Return the failures, as soon as one is there that is not the loss of another rank.

    A rank that lost its peers may report before the one that it lost.
    """
    deadline = time.monotonic() + WAIT_FOR_CULPRIT
    while time.monotonic() < deadline:
        if any(failure.kind != "lost" for failure in _failures(job, dead)):
            break
        if job.stop.wait(POLL) or len(dead) == job.nproc:
            break
        dead = _exit_codes(pids)
    # The exit code of a rank that was killed by a signal, a likelier cause, may come late.
    job.stop.wait(0.2)
    dead = _exit_codes(pids)
    failures = _failures(job, dead)
    if culprit(failures).kind == "signal":
        _wait_for_survivors(job, pids, dead)
    return failures


def _wait_for_survivors(job: _Launch, pids: dict[int, int], dead: dict[int, int]) -> None:
    """Wait while ranks that still run save what they hold of the state, at most for some time."""
    deadline = time.monotonic() + WAIT_FOR_SURVIVORS
    while any(outlives_peers(job.records, rank) for rank in pids.keys() - dead.keys()):
        if job.stop.wait(POLL) or time.monotonic() > deadline:
            break
        dead = _exit_codes(pids)


def _failures(job: _Launch, dead: dict[int, int]) -> list[Failure]:
    """Return the failures that ranks have recorded, and those of ranks that died in silence."""
    recorded = read_failures(job.records)
    failures = list(recorded.values())
    for rank, code in dead.items():
        if rank not in recorded:
            failures.append(_failure_from_exit_code(job, rank, code))
    return failures


def _failure_from_exit_code(job: _Launch, rank: int, code: int) -> Failure:
    """Return the failure of a rank that recorded none; ``code`` is negative for a signal."""
    if code >= 0:
        cause = f"exited with {code} before its work was done"
        if is_finished(job.records, rank):
            cause = (
                "returned a value that cannot be pickled, so that it cannot come back to the"
                " launcher"
            )
        return Failure(rank=rank, kind="error", cause=cause, when=time.time())
    name = signal.Signals(-code).name
    hint = ""
    if -code == signal.SIGKILL:  # the kernel sends it when memory runs out
        kills = oom_kills()
        # Where the kernel counts, an unchanged count says that somebody else sent the signal.
        if kills is None or kills != job.oom_kills_before:
            hint = " (out of memory?)"
    elif -code == signal.SIGABRT:
        hint = aborted_in(traceback_file(job.errors, rank))
    return Failure(rank=rank, kind="signal", cause=f"killed by {name}{hint}", when=time.time())


def _raise_for(job: _Launch, failures: list[Failure]) -> None:
    """Raise the error of the rank that most likely caused the other failures."""
    failure = culprit(failures)
    # SIGTERM came where the rank could not stop in order.
    if job.signals and failure.raised is None:
        raise SystemExit(128 + job.signals[0])
    file = traceback_file(job.errors, failure.rank)
    has_traceback = file.exists() and file.stat().st_size > 0
    if not has_traceback and failure.raised != StoppedError.__name__:
        states = (f"rank {other.rank}: {other.cause}\n" for other in failures)
        file.write_text(f"No traceback: {failure.cause}.\n{''.join(states)}", encoding="utf-8")
    error = failure.error(job.nproc, file)
    if job.signals and isinstance(error, StoppedError):  # ranks know SIGTERM alone
        error.exit_code = 128 + job.signals[0]
    raise error
