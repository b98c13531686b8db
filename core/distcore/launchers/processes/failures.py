"""Failures of ranks: a traceback in a file, one line on the screen, and an exit status
by kind of failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TextIO, TypeVar

from distcore.errors import (
    INTERRUPTED,
    DistcoreError,
    RankError,
    StoppedError,
    is_written_by_user,
    place_of,
    raised_at,
)
from distcore.launchers.processes.log_files import log_to_file
from distcore.launchers.processes.start_method import die_with_agent

T = TypeVar("T")

LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|failed to recv|recvvalue"
    r" failed|"
    r"connection was likely closed|remote process exited|peer (died|is gone)|timed out"
    r" (waiting|after)|wait timeout",
    re.IGNORECASE,
)
"""Error messages of backends in a rank that lost its connection to another rank, and so
is not the cause.
"""
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
"""A line of a crash log."""
COLLECTIVE = re.compile(r'File "[^"]*torch/distributed/distributed_c10d\.py"')
"""The frame of a thread in a collective of torch."""
WAIT_FOR_CULPRIT = 2.0
"""Seconds that a rank waits after losing a peer, so that the failed rank can report first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    """Number of the rank."""
    kind: Literal["signal", "error", "lost"]
    """``signal``: killed by one. ``error``: an error of its own. ``lost``: it only lost the
    connection to a peer.
    """
    cause: str
    """One line of text."""
    when: float
    """Seconds since the epoch."""
    exit_code: int = RankError.exit_code
    """Exit status of the rank's process."""
    raised: str | None = None
    """Class name of the DistcoreError that the rank raised; ``None`` for anything else."""
    at: str = ""
    """Where the user's code raised it, as ``raised_at`` says it."""

    def line(self, size: int, file: Path, where: str = "") -> str:
        """Return one line for the screen; an error that the user can correct does
        not name the rank.

        ``where``: the rank's machine and address, if the ranks are on several.
        """
        if self.raised:
            return self.cause
        what = "details" if self.kind == "signal" else "traceback"
        on = f" on {where}" if where else ""
        likely = (
            "; likely another rank, its machine or the link to it is gone"
            if where and self.kind == "lost"
            else ""
        )
        return (
            f"rank {self.rank} of {size}{on} failed: {self.cause}{likely}; {what} in"
            f" {file}{self.at}"
        )

    def error(self, size: int, file: Path) -> DistcoreError:
        """Return the exception that the launcher raises: the rank's own
        DistcoreError, else a RankError.
        """
        kind = _error_class(self.raised) if self.raised else RankError
        error = kind.__new__(kind)
        # a subclass may build its message from other arguments
        Exception.__init__(error, self.line(size, file))
        error.exit_code = self.exit_code
        return error


def culprit(failures: Iterable[Failure]) -> Failure:
    """Return the failure that most likely caused the others: signals before errors before lost
    peers, then by time.
    """
    order = ("signal", "error", "lost")

    def likeliest_first(failure: Failure) -> tuple[int, float]:
        return order.index(failure.kind), failure.when

    return min(failures, key=likeliest_first)


def run_and_record(fn: Callable[[], T], rank: int, errors: Path) -> T | Failure | None:
    """Run ``fn``; return its result, ``None`` for sys.exit(0), or its
    failure, with traceback ``errors/rank-N.txt``.
    """
    with _crash_log(traceback_file(errors, rank)) as log:
        try:
            return fn()
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return None
            if not isinstance(error, StoppedError):  # a clean stop is no failure to look into
                traceback.print_exc(file=log)
            return describe(error, rank)


def run_as_rank(
    fn: Callable[[], T],
    errors: Path,
    rank: int,
    size: int,
    where: str = "",
    home: Callable[[], Path | None] = lambda: None,
    explain: Callable[[Failure], str] = lambda _: "",
) -> T:
    """Run ``fn`` in rank ``rank`` of ``size``, which another launcher started; a
    failure ends this process.

    The traceback goes to ``errors/rank-N.txt``, and after the failure to the folder that
    ``home`` returns. In the message ``where`` names machine and address, if there are several;
    ``explain`` returns its end. One rank prints a
    line to stderr: the first with a failure of its own or, if a peer died without a message,
    one that lost the connection. The exit status is that of the DistcoreError, 130 for Ctrl-C, else
    3. A rank of distcore's agent dies with the agent.
    """
    die_with_agent()
    errors.mkdir(parents=True, exist_ok=True)
    screen = log_to_file(rank)
    outcome = run_and_record(fn, rank, errors)
    if isinstance(outcome, Failure):
        file = traceback_file(errors, rank)
        if not outcome.raised:
            file = _move_traceback(file, home)
        if _is_first_to_report(outcome, errors):
            with contextlib.suppress(ValueError):  # not in the main thread
                # Launchers send it as soon as another rank has ended.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            line = outcome.line(size, file, where) + explain(outcome)
            text = f"error: {line}"
            if outcome.exit_code == INTERRUPTED:
                text = "interrupted"
            if outcome.raised == StoppedError.__name__:
                text = line
            print(text, file=screen)
            # Where ranks log to files, stderr is the rank's file.
            if sys.stderr is not screen:
                print(text, file=sys.stderr)
        exit_now(outcome.exit_code)
    return outcome  # type: ignore[return-value]  # None where fn left by sys.exit(0)


def exit_now(code: int) -> NoReturn:
    """End this process at once.

    An ordinary exit could hang after a failure: threads and destructors of a backend may
    wait for dead peers.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def traceback_file(errors: Path, rank: int) -> Path:
    """Return the file in folder ``errors`` to which a rank writes its traceback."""
    return errors / f"rank-{rank}.txt"


def one_line(text: str, limit: int = 400) -> str:
    """Return ``text`` on one line, cut after ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _move_traceback(file: Path, home: Callable[[], Path | None]) -> Path:
    """Move a traceback into the folder that ``home`` returns, if it can; return where it is now."""
    try:
        folder = home()
        if folder is None:
            return file
        folder.mkdir(exist_ok=True)
        shutil.move(file, folder / file.name)
    except (OSError, DistcoreError):
        return file
    return folder / file.name


@contextmanager
def _crash_log(file: Path) -> Iterator[TextIO]:
    """Open ``file`` for a traceback, also for one of a fatal signal; remove the
    file if it stays empty.
    """
    enabled = faulthandler.is_enabled()
    with file.open("w", encoding="utf-8") as log:
        faulthandler.enable(log)
        try:
            yield log
        finally:
            if enabled:
                faulthandler.enable()
            else:
                faulthandler.disable()
    if not file.stat().st_size:
        file.unlink()


def describe(error: BaseException, rank: int) -> Failure:
    """Return how ``error`` ended ``rank``."""
    now = time.time()
    if isinstance(error, DistcoreError):
        name = type(error).__name__
        return Failure(
            rank=rank,
            kind="error",
            cause=str(error),
            when=now,
            exit_code=error.exit_code,
            raised=name,
        )
    if isinstance(error, SystemExit):
        return Failure(
            rank=rank, kind="error", cause=one_line(f"exited with {error.code!r}"), when=now
        )
    if isinstance(error, KeyboardInterrupt):
        return Failure(
            rank=rank, kind="error", cause="interrupted", when=now, exit_code=INTERRUPTED
        )
    cause = one_line(f"{type(error).__name__}: {error}".rstrip(": "))
    if is_lost_peer(error):
        return Failure(rank=rank, kind="lost", cause=f"lost its peers: {cause}", when=now)
    return Failure(rank=rank, kind="error", cause=cause, when=now, at=raised_at(error))


def is_lost_peer(error: BaseException | None) -> bool:
    """Return True for the error of a rank that lost its connection to another one."""
    while error is not None:
        network = isinstance(error, RuntimeError | OSError)  # torch's DistError is a RuntimeError
        if isinstance(error, ConnectionError) or (network and LOST_PEER.search(str(error))):
            return True
        error = error.__cause__
    return False


def aborted_in(file: Path) -> str:
    """Return in which collective, and by whose call, a rank was that a backend aborted, by its
    crash log; or nothing.

    A backend aborts the process where another rank's tensors have other sizes, and says so in
    words of its own.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    threads = text.split("\n\n")
    thread = next((part for part in threads if COLLECTIVE.search(part)), "")
    if not thread:
        return ""
    by_whom = ""
    # The innermost call is first.
    for match in FRAME.finditer(thread):
        if is_written_by_user(match["file"]):
            by_whom = f" at {place_of(match['file'], int(match['line']))}"
            break
    return (
        f" in a collective with other sizes than another rank had there{by_whom}: what forward and"
        " loss call must not follow from the rows of a rank"
    )


def _error_class(name: str) -> type[DistcoreError]:
    """Return the class of that name; DistcoreError if a plugin defines it and only ranks
    have imported that plugin.
    """
    classes = [DistcoreError]
    for error_class in classes:
        if error_class.__name__ == name:
            return error_class
        classes += error_class.__subclasses__()
    return DistcoreError


def _is_first_to_report(failure: Failure, errors: Path) -> bool:
    """Return True in the one rank that prints: the first to create a marker file. Ranks that
    lost a peer wait first.
    """
    marker = errors / "first"
    deadline = time.monotonic() + (WAIT_FOR_CULPRIT if failure.kind == "lost" else 0)
    while time.monotonic() < deadline:
        if _is_fresh(marker):
            return False
        time.sleep(0.05)
    if marker.exists() and not _is_fresh(marker):
        marker.unlink(missing_ok=True)  # left by an earlier job that used the same folder
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _is_fresh(marker: Path) -> bool:
    """Return True if ``marker`` exists and is younger than this process, so that it
    is of this job.
    """
    import psutil

    try:
        return marker.stat().st_mtime > psutil.Process().create_time()
    except FileNotFoundError:
        return False
