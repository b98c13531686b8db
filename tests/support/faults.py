"""Faults of the machines of ``machines``, each with a function that ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from machines import Machine

TIMEOUT = 20
"""``timeout`` of the runs, in seconds."""
SHORT, LONG = 3, TIMEOUT + 5
"""Seconds that faults last."""
Fault = Callable[[Machine, Path], tuple[float, Callable[[], object]]]
"""Cause the fault; return its duration in seconds, and the function that ends it."""


def send(number: signal.Signals, to: str, seconds: float = 0) -> Fault:
    """Return the fault that signals the rank or the agent of a machine. Stopped processes
    continue at its end.
    """

    def strike(node: Machine, disk: Path) -> tuple[float, Callable[[], object]]:
        pids = node.ranks() if to == "rank" else node.find("distcore_clusters.agent")
        for pid in pids:
            os.kill(pid, number)

        def undo() -> None:
            for pid in pids if number == signal.SIGSTOP else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        return seconds, undo

    return strike


def turn_off(node: Machine, disk: Path) -> tuple[float, Callable[[], object]]:
    """Kill all processes of a machine and cut its link."""
    node.kill()
    return SHORT, node.turn_on


def cut(seconds: float) -> Fault:
    """Return the fault that loses all messages of a machine for some seconds."""

    def strike(node: Machine, disk: Path) -> tuple[float, Callable[[], object]]:
        node.cut()
        return seconds, node.heal

    return strike


def fill(node: Machine, disk: Path) -> tuple[float, Callable[[], object]]:
    """Fill the disk of the run folder."""
    file = disk / "full"
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"\0" * 4096)
    return 2 * SHORT, file.unlink


FAULTS: dict[str, Fault] = {
    "a rank is killed": send(signal.SIGKILL, "rank"),
    "an agent is killed": send(signal.SIGKILL, "agent"),
    "a machine is turned off": turn_off,
    f"a link is cut for {SHORT} s": cut(SHORT),
    f"a link is cut for {LONG} s": cut(LONG),
    f"a rank is stopped for {SHORT} s": send(signal.SIGSTOP, "rank", SHORT),
    f"a rank is stopped for {LONG} s": send(signal.SIGSTOP, "rank", LONG),
    "the disk is full": fill,
    "SIGTERM to a rank": send(signal.SIGTERM, "rank"),
    "SIGTERM to an agent": send(signal.SIGTERM, "agent"),
}
