"""Each rank writes its position (case, hook and step) to a file, so that another process can
name a stuck rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from distcore.plugin.strategy.contract import Progress
from distcore.plugin.strategy.hooks import OPERATIONS
from distcore.plugin.strategy.hookspecs import hookimpl

SIZE = 256
"""Bytes of a position in its file. All have this size, so that a single write replaces
the previous one completely.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a rank is."""

    case: str = ""
    """The current case: a name from ``name_of``, ``setup_of`` or
    ``teardown_of`` in ``distcore.testing.rank``.
    """
    hook: str = ""
    """Name of the hook that is running; empty between hooks."""
    step: int = 0
    """Optimizer steps done by the last job that finished a step in this case."""
    calls: int = 0
    """Hook calls so far, over all cases."""
    since: float = 0.0
    """When this position was written, in seconds of Unix time."""

    def __str__(self) -> str:
        """Return hook, step and the whole seconds since then, without the case."""
        where = f"in hook {self.hook}()" if self.hook else "outside of any hook"
        return f"{where}, step {self.step}, for {time.time() - self.since:.0f} s"


class Trace:
    """Writes the position of this rank. Its ``extension`` must be among the
    extensions of the hooks.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Open the position file of ``rank`` in ``folder``, which must exist."""
        self._file = os.open(_file(folder, rank), os.O_CREAT | os.O_WRONLY)
        self._case = ""
        self._step = 0
        self._calls = 0

    def start(self, case: str) -> None:
        """Record that ``case`` begins."""
        self._case = case
        self._step = 0
        self._write("")

    def extension(self) -> object:
        """Return an extension that records when each of the strategy's hooks begins and ends,
        and the steps done.
        """
        # First of all wrappers, so that a rank that is stuck in another one is in the hook, too.
        wraps = hookimpl(wrapper=True, tryfirst=True)
        wrappers = {name: wraps(self._wrapper(name)) for name in OPERATIONS}
        on_step_end = hookimpl(lambda progress: self._at(progress))
        # It wraps every operation and changes nothing, so strategies that hide their gradients
        # take it, too.
        return SimpleNamespace(**wrappers, on_step_end=on_step_end, only_looks=True)

    def _wrapper(self, hook: str) -> Callable[[], Generator[None, object, object]]:
        def wrapper() -> Generator[None, object, object]:
            with self._track(hook):
                return (yield)

        return wrapper

    @contextmanager
    def _track(self, hook: str) -> Iterator[None]:
        self._calls += 1
        self._write(hook)
        yield
        self._write("")

    def _at(self, progress: Progress) -> None:
        self._step = progress.step

    def _write(self, hook: str) -> None:
        """Replace the position in the file: now in ``hook``, or, if it is empty, between hooks."""
        # The fields of a Position, without one: each hook of each step comes here twice.
        position = {
            "case": self._case,
            "hook": hook,
            "step": self._step,
            "calls": self._calls,
            "since": time.time(),
        }
        os.pwrite(self._file, json.dumps(position).ljust(SIZE).encode(), 0)


def positions(folder: Path, size: int) -> dict[int, Position]:
    """Return the last position of each of ``size`` ranks, by rank; ranks that wrote
    none are left out.
    """
    last_positions = {}
    for rank in range(size):
        file = _file(folder, rank)
        if file.exists() and (text := file.read_text().strip()):
            last_positions[rank] = Position(**json.loads(text))
    return last_positions


def who_is_stuck(positions: dict[int, Position]) -> str:
    """Return one line: the ranks with the fewest hook calls, where they are stuck, and
    where the others wait.

    ``positions`` must not be empty: ValueError.
    """
    behind = min(position.calls for position in positions.values())
    ranks = [rank for rank, position in positions.items() if position.calls == behind]
    sentences = [f"rank {', '.join(map(str, ranks))} is stuck {positions[ranks[0]]}"]
    for rank, position in positions.items():
        if rank not in ranks:
            sentences.append(f"rank {rank} waits {position}")
    return "; ".join(sentences)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"position-{rank}"
