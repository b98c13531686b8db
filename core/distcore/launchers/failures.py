"""What becomes of a rank that fails: the traceback goes to a file, the culprit to one line, and an exit status."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TextIO, TypeVar

from distcore.errors import DistcoreError, RankError, StoppedError

T = TypeVar("T")

LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|failed to recv|recvvalue failed|"
    r"connection was likely closed|remote process exited|peer (died|is gone)|timed out (waiting|after)|wait timeout",
    re.IGNORECASE,
)
"""What backends say in a rank whose peer is gone: the one who says it is the victim, not the culprit."""
WAIT_FOR_CULPRIT = 2.0
"""Seconds that a victim leaves to the culprit, who may still be tearing down, to be heard first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank ended. ``kind``: killed by a signal, an error of its own, or it only lost a peer."""

    rank: int
    kind: Literal["signal", "error", "lost"]
    cause: str
    when: float
    exit_code: int = RankError.exit_code
    raised: str | None = None
    """Class of the DistcoreError that it raised, ``None`` for anything else."""

    def line(self, size: int, file: Path) -> str:
        """One line for the screen; what a user can mend is said without the rank."""
        if self.raised:
            return self.cause
        what = "details" if self.kind == "signal" else "traceback"
        return f"rank {self.rank} of {size} failed: {self.cause}; {what} in {file}"

    def error(self, size: int, file: Path) -> DistcoreError:
        """The exception that the launcher raises: the rank's own DistcoreError, else a RankError."""
        kind = _error_class(self.raised) if self.raised else RankError
        error = kind.__new__(kind)
        Exception.__init__(error, self.line(size, file))  # a subclass may build its message from other arguments
        return error


def culprit(failures: Iterable[Failure]) -> Failure:
    """Return who brought the job down: signals first, then own errors, then lost peers; each by time."""
    order = ("signal", "error", "lost")
    return min(failures, key=lambda failure: (order.index(failure.kind), failure.when))


def attempt(fn: Callable[[], T], rank: int, errors: Path) -> T | Failure | None:
    """Run ``fn``; return what it returns, or how it failed, with the traceback in ``errors/rank-N.txt``.

    An exit with status 0 counts as returning ``None``.
    """
    with _crash_log(traceback_file(errors, rank)) as log:
        try:
            return fn()
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return None
            traceback.print_exc(file=log)
            return _describe(error, rank)


def run_as_rank(fn: Callable[[], T], errors: Path, rank: int, size: int) -> T:
    """Run ``fn`` in a rank that another launcher started; a failure ends this process.

    The traceback goes to ``errors/rank-N.txt``, one line to stderr from the first rank that fails on its own (or,
    where a peer vanished without a word, from one that noticed), and the exit status is 2, 3 or 130.
    """
    errors.mkdir(parents=True, exist_ok=True)
    outcome = attempt(fn, rank, errors)
    if isinstance(outcome, Failure):
        if _speaks_for_all(outcome, errors):
            line = outcome.line(size, traceback_file(errors, rank))
            told = {130: "interrupted", StoppedError.exit_code: line}.get(outcome.exit_code, f"error: {line}")
            print(told, file=sys.stderr)
        leave(outcome.exit_code)
    return outcome  # type: ignore[return-value]  # None where fn left by sys.exit(0)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program as the command line does: ``error: …`` and the error's exit status, or ``interrupted``, 130."""
    try:
        yield
    except DistcoreError as error:
        print(error if isinstance(error, StoppedError) else f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def leave(code: int) -> NoReturn:
    """End this process now: after a failure, threads and destructors of a backend may wait for dead peers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def traceback_file(errors: Path, rank: int) -> Path:
    """Where rank ``rank`` leaves its traceback."""
    return errors / f"rank-{rank}.txt"


def one_line(text: str, limit: int = 400) -> str:
    """Return ``text`` with its line breaks taken out and a long tail cut."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


@contextmanager
def _crash_log(file: Path) -> Iterator[TextIO]:
    """Open ``file`` for a traceback, a crash's too, which would fill the screen; remove it if it stays empty."""
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


def _describe(error: BaseException, rank: int) -> Failure:
    now = time.time()
    if isinstance(error, DistcoreError):
        name = type(error).__name__
        return Failure(rank=rank, kind="error", cause=str(error), when=now, exit_code=error.exit_code, raised=name)
    if isinstance(error, SystemExit):
        return Failure(rank=rank, kind="error", cause=one_line(f"exited with {error.code!r}"), when=now)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank=rank, kind="error", cause="interrupted", when=now, exit_code=130)
    cause = one_line(f"{type(error).__name__}: {error}".rstrip(": "))
    if _is_lost_peer(error):
        return Failure(rank=rank, kind="lost", cause=f"lost its peers: {cause}", when=now)
    return Failure(rank=rank, kind="error", cause=cause, when=now)


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether ``error``, or what it was raised from, is about a connection to another rank."""
    while error is not None:
        network = isinstance(error, RuntimeError | OSError)  # torch's DistError is a RuntimeError
        if isinstance(error, ConnectionError) or (network and LOST_PEER.search(str(error))):
            return True
        error = error.__cause__
    return False


def _error_class(name: str) -> type[DistcoreError]:
    """Find the class by name among those that exist here; a plugin's own is unknown if only ranks imported it."""
    classes = [DistcoreError]
    for found in classes:
        if found.__name__ == name:
            return found
        classes += found.__subclasses__()
    return DistcoreError


def _speaks_for_all(failure: Failure, errors: Path) -> bool:
    """Whether this rank is the one to write to the screen: the first that claims it, victims after a while."""
    claim = errors / "first"
    deadline = time.monotonic() + (WAIT_FOR_CULPRIT if failure.kind == "lost" else 0)
    while time.monotonic() < deadline:
        if _is_fresh(claim):
            return False
        time.sleep(0.05)
    if claim.exists() and not _is_fresh(claim):
        claim.unlink(missing_ok=True)  # of an earlier job with this folder
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _is_fresh(claim: Path) -> bool:
    import psutil

    try:
        return claim.stat().st_mtime > psutil.Process().create_time()
    except FileNotFoundError:
        return False
