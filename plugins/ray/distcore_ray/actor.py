"""What runs on the machines of the cluster: an actor that holds one rank, a process of its own."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


class Rank:
    """Starts the process of a rank, passes its lines on, and ends it. It must be able to end with this actor."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def where(self) -> tuple[str, int]:
        """Return the address of this machine, and a free port."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])

    def start(self, words: Sequence[str], environment: dict[str, str], folder: str) -> None:
        """Start the rank in ``folder``, with the variables of this machine but for Ray's, and those given."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._child = subprocess.Popen(
            words, cwd=folder, env=own | environment, text=True, errors="replace", preexec_fn=_end_with_parent,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._child,), daemon=True).start()

    def look(self) -> tuple[list[str], int | None]:
        """Return the lines that the rank has printed since the last look, and its exit status once it has one."""
        status = self._child.poll() if self._child else None
        found = []
        while not self._lines.empty():
            found.append(self._lines.get())
        return found, status

    def stop(self) -> None:
        """Ask the rank to save a checkpoint and to end."""
        if self._child and self._child.poll() is None:
            self._child.terminate()

    def _read(self, child: subprocess.Popen[str]) -> None:
        for line in child.stdout or ():
            self._lines.put(line)


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the actor is gone: Ray kills actors without a word."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
