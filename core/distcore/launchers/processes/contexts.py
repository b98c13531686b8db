"""Context managers for the time in which ranks run: traceback folder, signals,
logs and environment variables.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from distcore.distributed.devices import INTERFACES
from distcore.errors import ConfigError
from distcore.launchers.processes.cores import threads_per_rank
from distcore.plugin.strategy.contract import LOOPBACK
from distcore.rank_environment.environment import LAUNCHER_VARIABLE


@contextmanager
def errors_folder(given: Path | None) -> Iterator[Path]:
    """Provide the folder for tracebacks, ``given`` or a temporary one, without files
    of an earlier job.

    It is removed if it stays empty. Raises ConfigError if the folder cannot be used.
    """
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
            # the rank had no error of its own, it was ended with the others
            if not file.stat().st_size:
                file.unlink()
        with contextlib.suppress(OSError):  # not empty: it has a traceback to read
            folder.rmdir()


def raise_on_sigterm() -> AbstractContextManager[None]:
    """Have SIGTERM and SIGHUP raise SystemExit, so that clean-up runs, unless the program has
    handlers of its own.
    """

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # Windows has no SIGHUP.
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    unhandled = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    return _handle(unhandled, unwind)


def handle_stop_signals(
    ask: Callable[[int], object], ctrl_c: bool = True, says_so: bool = True
) -> AbstractContextManager[None]:
    """Call ``ask`` with its number on SIGTERM, SIGHUP and, with ``ctrl_c``, the first
    Ctrl-C; restore all afterward.

    A second Ctrl-C raises KeyboardInterrupt; with ``says_so`` a line tells the user, once for each
    signal. A program that ignores Ctrl-C or SIGHUP, as under nohup, or has its own handler, keeps
    that.
    """
    line = "stopping at the next log line or sooner"
    lines = {
        signal.SIGINT.value: f"\n{line}; Ctrl-C again ends at once\n",
        signal.SIGTERM.value: f"{line}\n",
    }
    asks = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        asks.append(signal.SIGHUP)
    process = os.getpid()

    def on_signal(number: int, frame: object) -> None:
        ask(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Processes that load data have inherited this handler.
        if says_so and os.getpid() == process:
            os.write(2, lines.pop(number, "").encode())  # print() must not be called here

    if ctrl_c and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        asks.append(signal.SIGINT)
    return _handle(asks, on_signal)


@contextmanager
def _handle(signals: Iterable[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle ``signals``; outside the main thread, which alone may, do nothing: Linux ends
    ranks with this process.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals if is_main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def silence_torchelastic() -> Iterator[None]:
    """Silence torchelastic's loggers: distcore reports a failure itself, in one line."""
    logger = logging.getLogger("torch.distributed.elastic")
    silent = logging.NullHandler()
    before = logger.propagate
    logger.addHandler(silent)
    logger.propagate = False  # not by its level: some loggers below it have one of their own
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silent)


@contextmanager
def set_missing_variables(defaults: dict[str, str]) -> Iterator[None]:
    """Set the ``defaults`` that the environment lacks before a rank imports what reads
    them; remove them afterward.
    """
    new = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def shared_environment(nproc: int) -> dict[str, str]:
    """Return environment variables for all ranks: an equal share of the cores,
    and the loopback interface.
    """
    shared = {"OMP_NUM_THREADS": str(threads_per_rank(nproc)), "TOKENIZERS_PARALLELISM": "false"}
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback:  # on the rare machine without either name the backends choose an interface
        shared |= dict.fromkeys(INTERFACES, loopback)
    return shared


def rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the environment variables of one rank, under torchrun's names;
    ``port`` is the store's.
    """
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
        # the launcher hosts the store: rank 0 must not open another
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER_VARIABLE: "local",
    }
