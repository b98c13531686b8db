"""Where every rank is, so that a stuck one can be named: case, hook and step, in a file that others can read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from distcore.plugin.contract import Progress
from distcore.plugin.hooks import OPERATIONS
from distcore.plugin.hookspecs import hookimpl

SIZE = 256
"""Bytes of a record: one write, so that a reader never sees half of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a rank is: ``hook`` is empty between hooks, ``calls`` counts the hooks that it has entered."""

    case: str = ""
    hook: str = ""
    step: int = 0
    calls: int = 0
    since: float = 0.0

    def __str__(self) -> str:
        where = f"in hook {self.hook}()" if self.hook else "outside of any hook"
        return f"{where}, step {self.step}, for {time.time() - self.since:.0f} s"


class Trace:
    """Writes this rank's position; ``extension()`` is what must be among the hooks' extensions."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(_file(folder, rank), os.O_CREAT | os.O_WRONLY)
        self._case = ""
        self._step = 0
        self._calls = 0

    def start(self, case: str) -> None:
        """A case begins."""
        self._case, self._step = case, 0
        self._write("")

    def extension(self) -> object:
        """An extension that wraps every operation."""
        wrappers = {name: hookimpl(wrapper=True, tryfirst=True)(self._wrapper(name)) for name in OPERATIONS}
        return SimpleNamespace(**wrappers, on_step_end=hookimpl(lambda progress: self._at(progress)))

    def _wrapper(self, hook: str) -> Callable[[], Generator[None, object, object]]:
        def wrapper() -> Generator[None, object, object]:
            with self._inside(hook):
                return (yield)

        return wrapper

    @contextmanager
    def _inside(self, hook: str) -> Iterator[None]:
        self._calls += 1
        self._write(hook)
        yield
        self._write("")

    def _at(self, progress: Progress) -> None:
        self._step = progress.step

    def _write(self, hook: str) -> None:
        now = Position(case=self._case, hook=hook, step=self._step, calls=self._calls, since=time.time())
        os.pwrite(self._file, json.dumps(asdict(now)).ljust(SIZE).encode(), 0)


def positions(folder: Path, size: int) -> dict[int, Position]:
    """Where each rank was last seen; ranks that never began are left out."""
    found = {}
    for rank in range(size):
        file = _file(folder, rank)
        if file.exists() and (text := file.read_text().strip()):
            found[rank] = Position(**json.loads(text))
    return found


def who_is_stuck(found: dict[int, Position]) -> str:
    """Name the ranks that are furthest behind, for whom the others wait, and where they are."""
    behind = min(position.calls for position in found.values())
    ranks = [rank for rank, position in found.items() if position.calls == behind]
    stuck = f"rank {', '.join(map(str, ranks))} is stuck {found[ranks[0]]}"
    others = [f"rank {rank} waits {position}" for rank, position in found.items() if rank not in ranks]
    return "; ".join([stuck, *others])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"position-{rank}"
