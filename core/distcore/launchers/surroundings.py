"""What is around the ranks of this machine while they live: environment, signals, logs, the folder for tracebacks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distcore.distributed.devices import available_cores
from distcore.errors import ConfigError
from distcore.launchers.environment import LAUNCHER_VARIABLE
from distcore.plugin.contract import LOOPBACK


@contextmanager
def errors_folder(given: Path | None) -> Iterator[Path]:
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
def sigterm_raises() -> Iterator[None]:
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
def sigterm_sets(told: threading.Event) -> Iterator[None]:
    """Let SIGTERM, however often it comes, set ``told``; the program's own handler is back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def quiet_torchelastic() -> Iterator[None]:
    """Keep torchelastic from the screen: it has no news that the one line does not tell."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set what the user has not, while ranks are alive: a forked library and a spawned torch read it at birth."""
    new = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def shared_environment(nproc: int) -> dict[str, str]:
    shared = {"OMP_NUM_THREADS": str(max(1, available_cores() // nproc)), "TOKENIZERS_PARALLELISM": "false"}
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback:  # else the backends choose: a machine without loopback by these names is a rare one
        shared |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return shared


def rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
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
