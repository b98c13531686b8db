"""Starting ranks on this machine through torchelastic's process API, and ending them together.

One process supervises: it holds the ranks' store on a loopback port, sees the deaths of ranks as they are, and
says who was to blame. torchelastic's agent would add a rendezvous between machines, of which there is one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported by name
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes

from distcore.errors import ConfigError, RankError
from distcore.launch.environment import LAUNCHER_VARIABLE, LOOPBACK
from distcore.launch.failures import WAIT_FOR_CULPRIT, Failure, culprit, traceback_file
from distcore.launch.rank import is_finished, read_failures, serve

T = TypeVar("T")

POLL = 0.03
"""Seconds between two looks at the ranks."""
LAST_WORDS = 0.2
"""Seconds after a culprit is known in which a likelier one (killed by a signal) may still show."""
GRACE = 1
"""Seconds between SIGTERM and SIGKILL when the job is ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    entry: Callable[[], object]
    nproc: int
    errors: Path
    records: Path
    """Private folder in which ranks tell how they ended."""
    deadline: float
    stop: threading.Event


def start(
    fn: Callable[..., T], args: tuple[Any, ...], nproc: int, errors: Path | None, timeout: float | None
) -> list[T]:
    """See ``distcore.launch.launch``."""
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: expected a number of processes, 1 or more")
    with ExitStack() as stack:
        job = _Job(
            entry=partial(fn, *args),
            nproc=nproc,
            errors=stack.enter_context(_errors_folder(errors)),
            records=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distcore-"))),
            deadline=time.monotonic() + timeout if timeout else float("inf"),
            stop=threading.Event(),
        )
        stack.enter_context(_sigterm_raises())
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
        stack.enter_context(_quiet_torchelastic())
        stack.enter_context(_environment(_shared_environment(job.nproc)))
        ranks = _start_ranks(job, listener.getsockname()[1])
        stack.callback(ranks.close, signal.SIGTERM, GRACE)
        # After the fork, which copies no thread of the store's; the socket is ours, because TCPStore by itself
        # listens on every interface. Early clients wait in the socket's backlog.
        store = TCPStore(  # noqa: F841  # it serves as long as it lives
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=os.dup(listener.fileno()),
        )
        return _wait(job, ranks)


def _start_ranks(job: _Job, port: int) -> PContext:
    arguments = (job.entry, job.errors, job.records, os.getpid())
    return start_processes(
        name="rank",
        entrypoint=serve,
        args=dict.fromkeys(range(job.nproc), arguments),
        envs={rank: _rank_environment(rank, job.nproc, port) for rank in range(job.nproc)},
        logs_specs=DefaultLogsSpecs(log_dir=str(job.records)),
        start_method=start_method(),
    )


def _wait(job: _Job, ranks: PContext) -> list[Any]:
    """Return the results in rank order, or raise for the rank that is to blame."""
    pids = ranks.pids()
    while not job.stop.wait(POLL):
        if dead := _exit_codes(pids):
            _raise_for(job, _settle(job, pids, dead))
        # Asked only once all have finished: torchelastic would end the others at the first death that it sees,
        # before it is known whose fault that was.
        result = ranks.wait(0) if all(is_finished(job.records, rank) for rank in pids) else None
        if result is not None and not result.is_failed():
            return [result.return_values[rank] for rank in range(job.nproc)]
        if result is not None:
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            _raise_for(job, _failures(job, codes))
        if time.monotonic() > job.deadline:
            raise RankError(f"{job.nproc} rank(s) did not end within their time limit and were stopped")
    raise RankError("stopped")


def _exit_codes(pids: dict[int, int]) -> dict[int, int]:
    """Exit codes of ranks that are dead (negative: the signal); they stay for torchelastic to reap."""
    dead: dict[int, int] = {}
    for rank, pid in pids.items():
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
    file = traceback_file(job.errors, failure.rank)
    if not file.exists() or not file.stat().st_size:
        states = (f"rank {other.rank}: {other.cause}\n" for other in failures)
        file.write_text(f"No traceback: {failure.cause}.\n{''.join(states)}", encoding="utf-8")
    raise failure.error(job.nproc, file)


@contextmanager
def _errors_folder(given: Path | None) -> Iterator[Path]:
    """A folder for tracebacks, free of those of an earlier job; it goes again if it is ours and stays empty."""
    folder = given.absolute() if given else Path(tempfile.mkdtemp(prefix="distcore-errors-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*.txt"):
            old.unlink()
    except OSError as error:
        raise ConfigError(f"folder for tracebacks {folder}: {error.strerror}") from None
    try:
        yield folder
    finally:
        for file in folder.glob("rank-*.txt"):
            if not file.stat().st_size:  # of a rank that was ended with the others
                file.unlink()
        if given is None:
            with contextlib.suppress(OSError):  # not empty: somebody will want to read it
                folder.rmdir()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this process, unless the program handles them itself."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a killed parent takes its ranks along all the same
        return

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signals = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Keep torchelastic from the screen: it has no news that the one line does not tell."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set what the user has not, while ranks are alive: a forked library and a spawned torch read it at birth."""
    new = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def _shared_environment(nproc: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = {"OMP_NUM_THREADS": str(max(1, cores // nproc)), "TOKENIZERS_PARALLELISM": "false"}
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback:  # else the backends choose: a machine without loopback by these names is a rare one
        shared |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return shared


def _rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"distcore-{os.getpid()}-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here already: rank 0 must not open a second one
        LAUNCHER_VARIABLE: "local",
    }
