"""A pytest plugin: programs of distcore that a test starts need not import torch and transformers
again; they are forks of a process that has, one for all workers of a session.

Tests with the mark ``fresh`` start them as users do, those of ``FRESH`` among them. So do programs
of another environment, session, network or user than that of the tests, of a terminal, with code in
the command line, and ranks of other launchers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("warm_process.py")
FOLDER = "DISTCORE_TEST_WARM"
SOCKETS = ("all", "torch")
"""As ``at_start/warm_start.py`` has them."""
FRESH = (
    "tests/cli/",
    "tests/launchers/",
    "tests/engine/test_preemption.py",
    "tests/jobs/test_restarts.py",
)
"""What is about imports, about signals, or about the processes of a program, by where it stands."""
BEGAN_WITH: dict[str, str] = {}
"""The environment of this process before the libraries of tests have changed it."""
STARTED = pytest.StashKey[tuple[tempfile.TemporaryDirectory[str], list[subprocess.Popen[bytes]]]]()


@pytest.hookimpl(trylast=True)  # after rank_watch has set the path of modules
def pytest_configure(config: pytest.Config) -> None:
    """Start the processes, in the one of the session that starts the workers."""
    if FOLDER not in os.environ and sys.platform == "linux":
        folder = tempfile.TemporaryDirectory(prefix="distcore-warm-")
        config.stash[STARTED] = folder, [_start(Path(folder.name), name) for name in SOCKETS]
        os.environ[FOLDER] = folder.name
    BEGAN_WITH.update(os.environ)


def _start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start the process that listens on the socket of that name."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / name))
        listener.listen(64)
        return subprocess.Popen(
            [sys.executable, PROGRAM, name, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say why programs started fresh that might have been warm: they cost seconds each."""
    folder, _ = config.stash.get(STARTED, (None, []))
    told = Path(folder.name, "fresh") if folder else None
    if told and told.exists():
        for why, count in Counter(told.read_text().splitlines()).most_common(10):
            terminalreporter.write_line(f"{count} program(s) started fresh: {why}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes, and with them what their forks have left."""
    if STARTED in config.stash:
        folder, processes = config.stash[STARTED]
        for process in processes:
            process.kill()
            process.wait()
        folder.cleanup()
        del os.environ[FOLDER]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ``FRESH``."""
    for item in items:
        if item.nodeid.startswith(FRESH):
            item.add_marker("fresh")


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of tests with the mark start as users start them."""
    if request.node.get_closest_marker("fresh"):
        monkeypatch.delenv(FOLDER, raising=False)
