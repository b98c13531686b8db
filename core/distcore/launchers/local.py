"""Starting ranks on this machine through torchelastic's process API, and ending them together.

One process supervises: it holds the ranks' store on a loopback port, sees the deaths of ranks as they are, and
says who was to blame. torchelastic's agent would add a rendezvous between machines, of which there is one.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported by name
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from distcore.errors import ConfigError, RankError
from distcore.launchers.failures import WAIT_FOR_CULPRIT, Failure, culprit, traceback_file
from distcore.launchers.rank import is_finished, read_failures, serve
from distcore.launchers.surroundings import (
    environment,
    errors_folder,
    quiet_torchelastic,
    rank_environment,
    shared_environment,
    sigterm_raises,
    sigterm_sets,
)
from distcore.plugin.contract import LOOPBACK

T = TypeVar("T")

POLL = 0.03
"""Seconds between two looks at the ranks."""
LAST_WORDS = 0.2
"""Seconds after a culprit is known in which a likelier one (killed by a signal) may still show."""
GRACE = 1
"""Seconds between SIGTERM and SIGKILL when the job is ended."""
CAN_SEE_DEATHS = hasattr(os, "waitid")
"""False on macOS before Python 3.13."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    entry: Callable[[], object]
    nproc: int
    errors: Path
    records: Path
    """Private folder in which ranks tell how they ended."""
    deadline: float
    stop: threading.Event
    told: threading.Event
    """Set when SIGTERM is to be passed on to the ranks."""
    patience: float


def run_ranks(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    nproc: int,
    errors: Path | None,
    timeout: float | None,
    patience: float,
) -> list[T]:
    """See ``distcore.launchers.launch``."""
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: expected a number of processes, 1 or more")
    with ExitStack() as stack:
        job = _Job(
            entry=partial(fn, *args),
            nproc=nproc,
            errors=stack.enter_context(errors_folder(errors)),
            records=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distcore-"))),
            deadline=time.monotonic() + timeout if timeout else float("inf"),
            stop=threading.Event(),
            told=threading.Event(),
            patience=patience,
        )
        stack.enter_context(sigterm_sets(job.told) if patience else sigterm_raises())
        return _in_thread(partial(_supervise, job), job.stop)


def start_method() -> Literal["fork", "spawn"]:
    """Fork where that is safe: 4 s faster, and ``fn`` need not be importable.

    A process that has talked to the CUDA driver cannot be forked: its children find no device. Asking torch whether
    CUDA is there is enough for that, unless PYTORCH_NVML_BASED_CUDA_CHECK=1. macOS' own libraries do not survive it.
    """
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if sys.platform != "linux" or started or _driver_in_use():
        return "spawn"
    return "fork"


def _driver_in_use() -> bool:
    """Whether cuInit was called: it keeps this device file open, and NVML does not."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) == "/dev/nvidia-uvm":
                return True
    return False


def _in_thread(work: Callable[[], T], stop: threading.Event) -> T:
    """Run ``work`` in a thread of its own; whatever interrupts the wait sets ``stop`` and waits for its end.

    Forking from a fresh thread, not from the caller's: OpenMP keeps a pool for each thread that ran a parallel
    region, and a child that inherits one waits for ever for workers that the fork did not copy.
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


def _supervise(job: _Job) -> list[Any]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=job.nproc + 16))
        stack.enter_context(quiet_torchelastic())
        stack.enter_context(environment(shared_environment(job.nproc)))
        ranks = _start_ranks(job, listener.getsockname()[1])
        stack.callback(ranks.close, signal.SIGTERM, GRACE)
        # After the fork, which copies no thread of the store's; the socket is ours, because TCPStore by itself
        # listens on every interface. Early clients wait in the socket's backlog.
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
            del store  # an error's traceback would keep it, and a rank of the next launch that collects it crashes


def _start_ranks(job: _Job, port: int) -> PContext:
    arguments = (job.entry, job.errors, job.records, os.getpid())
    return start_processes(
        name="rank",
        entrypoint=serve,
        args=dict.fromkeys(range(job.nproc), arguments),
        envs={rank: rank_environment(rank, job.nproc, port) for rank in range(job.nproc)},
        logs_specs=DefaultLogsSpecs(log_dir=str(job.records)),
        start_method=start_method(),
    )


def _wait(job: _Job, ranks: PContext) -> list[Any]:
    """Return the results in rank order, or raise for the rank that is to blame."""
    pids = ranks.pids()
    deadline = job.deadline
    passed_on = False
    while not job.stop.wait(POLL):
        if job.told.is_set() and not passed_on:
            passed_on, deadline = True, min(deadline, time.monotonic() + job.patience)
            _tell(pids)
        if dead := _exit_codes(pids):
            _raise_for(job, _settle(job, pids, dead))
        # Asked only once all have finished: torchelastic would end the others at the first death that it sees,
        # before it is known whose fault that was. Where deaths cannot be seen by other means, it has to do.
        asked = not CAN_SEE_DEATHS or all(is_finished(job.records, rank) for rank in pids)
        result = ranks.wait(0) if asked else None
        if result is not None and not result.is_failed():
            return [result.return_values[rank] for rank in range(job.nproc)]
        if result is not None:
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            _raise_for(job, _failures(job, codes))
        if time.monotonic() > deadline:
            if passed_on:
                raise SystemExit(128 + signal.SIGTERM)
            raise RankError(f"{job.nproc} rank(s) did not end within their time limit and were stopped")
    raise RankError("stopped")


def _tell(pids: dict[int, int]) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _exit_codes(pids: dict[int, int]) -> dict[int, int]:
    """Exit codes of ranks that are dead (negative: the signal); they stay for torchelastic to reap."""
    dead: dict[int, int] = {}
    for rank, pid in pids.items() if CAN_SEE_DEATHS else ():
        with contextlib.suppress(ChildProcessError):
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                dead[rank] = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
    return dead


def _settle(job: _Job, pids: dict[int, int], dead: dict[int, int]) -> list[Failure]:
    """Give the culprit time to be seen, when so far only its victims, which lost their peer, have been."""
    deadline = time.monotonic() + WAIT_FOR_CULPRIT
    while all(failure.kind == "lost" for failure in _failures(job, dead)) and time.monotonic() < deadline:
        if job.stop.wait(POLL) or len(dead) == job.nproc:
            break
        dead = _exit_codes(pids)
    job.stop.wait(LAST_WORDS)
    return _failures(job, _exit_codes(pids))


def _failures(job: _Job, dead: dict[int, int]) -> list[Failure]:
    """What the ranks told, and for those that died without a word what their exit code says."""
    told = read_failures(job.records)
    return [*told.values(), *(_silent_death(job, rank, code) for rank, code in dead.items() if rank not in told)]


def _silent_death(job: _Job, rank: int, code: int) -> Failure:
    if code >= 0:
        cause = f"exited with {code} before its work was done"
        if is_finished(job.records, rank):
            cause = "returned a value that cannot be pickled, so that it cannot come back to the launcher"
        return Failure(rank=rank, kind="error", cause=cause, when=time.time())
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return Failure(rank=rank, kind="signal", cause=f"killed by {name}{hint}", when=time.time())


def _raise_for(job: _Job, failures: list[Failure]) -> None:
    failure = culprit(failures)
    if job.told.is_set() and failure.raised is None:  # SIGTERM met it where it could not stop in good order
        raise SystemExit(128 + signal.SIGTERM)
    file = traceback_file(job.errors, failure.rank)
    if not file.exists() or not file.stat().st_size:
        states = (f"rank {other.rank}: {other.cause}\n" for other in failures)
        file.write_text(f"No traceback: {failure.cause}.\n{''.join(states)}", encoding="utf-8")
    raise failure.error(job.nproc, file)
