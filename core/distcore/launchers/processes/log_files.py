"""Output of a rank: a log file per rank in the folder of ``--log-dir``, and stderr
closed to C++ code.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from distcore.errors import ConfigError

LOG_DIR_VARIABLE = "DISTCORE_LOG_DIR"
"""Environment variable with the absolute folder; unset: no files."""


def log_to_file(rank: int) -> TextIO:
    """Redirect this process's output to ``rank-N.log``, for rank 0 to the screen as well;
    return the screen's stream.

    Appends, so that a resumed run keeps its earlier lines. Without ``--log-dir`` nothing changes.
    Raises ConfigError if the file cannot be written.
    """
    folder = os.environ.get(LOG_DIR_VARIABLE)
    if not folder:
        return sys.stderr
    file = Path(folder, f"rank-{rank}.log")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"--log-dir {folder}: {error.strerror}") from None
    screen = os.fdopen(os.dup(2), "w", buffering=1) if rank else sys.stderr
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        if rank:
            os.dup2(descriptor, number)
        else:
            _to_both(file, number)
    os.close(descriptor)
    return screen


def _to_both(file: Path, number: int) -> None:
    """Send what is written to file descriptor ``number`` to ``file`` as well."""
    # SLURM sends SIGTERM to whatever a task has started: without tee the rank could not say
    # how it stopped.
    words = ["sh", "-c", "trap '' HUP INT TERM; exec tee -a \"$0\"", str(file)]
    tee = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=number, start_new_session=True)
    assert tee.stdin is not None  # it is a pipe
    os.dup2(tee.stdin.fileno(), number)
    tee.stdin.close()


@contextmanager
def write_pid_file() -> Iterator[None]:
    """Keep this process's id in ``pid`` in the folder of the logs, while a run lasts."""
    folder = os.environ.get(LOG_DIR_VARIABLE)
    if not folder:
        yield
        return
    file = Path(folder, "pid")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{os.getpid()}\n")
    except OSError as error:
        raise ConfigError(f"--log-dir {folder}: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


@contextmanager
def close_stderr() -> Iterator[None]:
    """Discard all output to stderr: torch's profiler warns there about forked processes."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
