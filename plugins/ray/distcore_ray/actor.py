"""The actor of a rank on a Ray node: it starts the rank's process, reads its output and ends it."""

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
"""Seconds between two looks at the process."""
LAST_WORDS = 10
"""Seconds that what a rank has printed may take to arrive after its end; a child of its own may hold the pipe."""


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    host: str
    """Name of the machine, for messages."""
    address: str
    """By which the other nodes reach it."""
    port: int
    """A TCP port that was free."""


@dataclass(frozen=True)
class Said:
    """What a rank has done since it was asked last."""

    lines: tuple[tuple[str, str], ...]
    """``stdout`` or ``stderr``, and a line with its end."""
    status: int | None
    """Exit status, negative for a signal; ``None``: it runs."""


class Rank:
    """One rank. All methods run in the main thread of Ray's worker, whose end is that of the process."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lines: list[tuple[str, str]] = []
        self._news = threading.Condition()
        self._readers: list[threading.Thread] = []
        self._process: subprocess.Popen[str] | None = None

    def place(self) -> Place:
        """Return where this is."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return Place(socket.gethostname(), ray.util.get_node_ip_address(), int(probe.getsockname()[1]))

    def start(self, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> str | None:
        """Start the rank by ``python WORDS`` in ``folder``; return one line about why that cannot be, or ``None``."""
        command = [sys.executable, "-m", "distcore_ray.child", str(os.getpid()), sys.executable, *words]
        share = max(1, len(os.sched_getaffinity(0)) // int(variables["LOCAL_WORLD_SIZE"]))
        environment = {**rank_environment(os.environ), "OMP_NUM_THREADS": str(share), **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen(  # type: ignore[call-overload]
                command, cwd=folder, env=environment, text=True, errors="replace", **pipes
            )
        except OSError as error:
            return f"{socket.gethostname()}: {folder}: {error.strerror}"
        assert self._process is not None  # pipes hide its type
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            self._readers.append(threading.Thread(target=self._read, args=(name, pipe), daemon=True))
            self._readers[-1].start()
        return None

    def listen(self, seconds: float) -> Said:
        """Return what is new, after ``seconds`` at the latest."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while (status := self._process.poll()) is None and time.monotonic() < deadline:
            with self._news:
                if self._lines or self._news.wait(TICK):
                    break
        if status is not None:
            last = time.monotonic() + LAST_WORDS
            for reader in self._readers:
                reader.join(max(0, last - time.monotonic()))
        with self._news:
            lines, self._lines = tuple(self._lines), []
        return Said(lines, status)

    def terminate(self) -> None:
        """Ask the rank to save a checkpoint and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _read(self, name: str, pipe: IO[str]) -> None:
        for line in pipe:
            with self._news:
                self._lines.append((name, line))
                self._news.notify()


def rank_environment(worker: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank gets of those of Ray's ``worker``: what is meant for Ray alone stays behind.

    Ray sets OMP_NUM_THREADS to the CPUs that an actor asked for, which here is always one.
    """
    return {name: value for name, value in worker.items() if not name.startswith("RAY_") and name != "OMP_NUM_THREADS"}


def variables_of(rank: int, nodes: int, nproc: int, first: Place) -> dict[str, str]:
    """Return the variables by which ``rank`` joins the others, under torchrun's names; ``first`` is rank 0's place."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * nproc),
        "LOCAL_RANK": str(rank % nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(first.port),
        "DISTCORE_LAUNCHER": "ray",
    }
