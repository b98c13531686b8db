"""The Ray actor of a rank, which starts the rank's process, reads its output and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

TICK = 0.1
"""Seconds between two checks of the process."""
LAST_WORDS = 10
"""Seconds to wait for output after a rank's end: a child of it may hold the pipe open."""


@dataclass(frozen=True)
class RankAddress:
    """The address of a rank."""

    host: str
    """Name of the machine, for messages."""
    address: str
    """IP address for the other nodes."""
    port: int
    """A free TCP port."""


@dataclass(frozen=True)
class RankOutput:
    """The output of a rank since the last call."""

    lines: tuple[tuple[str, str], ...]
    """Lines with their ends, each with ``stdout`` or ``stderr``."""
    status: int | None
    """Exit status, negative for a signal; ``None`` while the rank runs."""


class Rank:
    """One rank, whose process dies with Ray's worker.

    All methods run in the main thread of the worker.
    """

    def __init__(self) -> None:
        """Prepare the actor; ``start`` starts the process."""
        self._lines: list[tuple[str, str]] = []
        self._news = threading.Condition()
        self._readers: list[threading.Thread] = []
        self._process: subprocess.Popen[str] | None = None

    def find_address(self) -> RankAddress:
        """Return the address of this actor."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))  # port 0: the kernel chooses a free one
            port = int(probe.getsockname()[1])
        return RankAddress(socket.gethostname(), ray.util.get_node_ip_address(), port)

    def start(self, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> str | None:
        """Start the rank by ``python WORDS`` in ``folder``; return a one-line error or ``None``."""
        # The child module ends the rank when this worker is gone, even if it was killed.
        starter = ["-m", "distcore_ray.child", str(os.getpid())]
        command = [sys.executable, *starter, sys.executable, *words]
        cpus = len(os.sched_getaffinity(0))
        threads = max(1, cpus // int(variables["LOCAL_WORLD_SIZE"]))
        environment = rank_environment(os.environ)
        environment["OMP_NUM_THREADS"] = str(threads)
        environment.update(variables)
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            return f"{socket.gethostname()}: {folder}: {error.strerror}"
        # A thread a pipe: a rank that fills the one that nobody reads would hang.
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            reader = threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            self._readers.append(reader)
            reader.start()
        return None

    def listen(self, seconds: float) -> RankOutput:
        """Return new output, after ``seconds`` at the latest."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while (status := self._process.poll()) is None and time.monotonic() < deadline:
            with self._news:
                if self._lines or self._news.wait(TICK):
                    break
        if status is not None:
            # The pipes may still hold the traceback that says why the rank ended.
            last_output = time.monotonic() + LAST_WORDS
            for reader in self._readers:
                reader.join(max(0, last_output - time.monotonic()))
        with self._news:
            lines = tuple(self._lines)
            self._lines.clear()
        return RankOutput(lines, status)

    def terminate(self) -> None:
        """Ask the rank to save a checkpoint, and to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _read(self, name: str, pipe: IO[str]) -> None:
        """Collect the lines of a pipe until its end, in a thread of its own."""
        for line in pipe:
            with self._news:
                self._lines.append((name, line))
                self._news.notify()


def rank_environment(worker: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: that of Ray's ``worker`` without Ray's own variables.

    Drops OMP_NUM_THREADS, too, which Ray sets to the number of CPUs of the actor, here always 1.
    """
    environment = {}
    for name, value in worker.items():
        if not name.startswith("RAY_") and name != "OMP_NUM_THREADS":
            environment[name] = value
    return environment


def variables_of(rank: int, nodes: int, nproc: int, first: RankAddress) -> dict[str, str]:
    """Return the variables of ``rank`` under torchrun's names. ``first``: address of rank 0."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * nproc),
        "LOCAL_RANK": str(rank % nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(first.port),
        "DISTCORE_LAUNCHER": "ray",
    }
