"""What a rank of the kit does: set the world up once, run many cases in it, tell what it found, leave."""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distcore.config import RunConfig
from distcore.distributed.devices import resolve_device
from distcore.engine.resolve import build_strategy
from distcore.errors import DistcoreError
from distcore.files import write_atomically
from distcore.launchers.environment import join
from distcore.launchers.failures import one_line
from distcore.plugin.contract import RankInfo, World
from distcore.plugin.hooks import Hooks
from distcore.testing.cases import Case, Finding, Skip
from distcore.testing.lab import Lab, await_true
from distcore.testing.trace import Trace

SETUP = 120.0
"""Seconds that a backend may take to start, or to leave: it may have much to import."""
GRACE = 2.0
"""Seconds that a rank whose case failed leaves the others to fail, too, before it ends the group."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A strategy under test: by its config, or built by ``make``, and the cases that it is to pass."""

    config: RunConfig
    cases: tuple[Case, ...]
    label: str = ""
    make: Callable[[RunConfig], object] = field(default=build_strategy)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What the ranks of one launch are to do. ``todo``: pairs of subject and case, by their numbers."""

    subjects: tuple[Subject, ...]
    todo: tuple[tuple[int, int], ...]
    folder: Path
    limit: float
    """Seconds that one case may take; after them the rank writes its stack and ends."""


def serve(assignment: Assignment) -> None:
    """Run the cases in this rank; what was found lies in the folder, one file a case and rank."""
    rank_info = join(os.environ) or RankInfo()
    trace = Trace(assignment.folder, rank_info.rank)
    first = assignment.subjects[assignment.todo[0][0]]
    hooks = _hooks(first, trace)
    trace.start("setup")
    with _Deadline(assignment, rank_info.rank) as deadline:
        world = hooks.setup(_on_device(first.config), rank_info)
        for number, case in assignment.todo:
            deadline.restart()
            trace.start(name_of(number, case))
            _serve_case(assignment, number, case, trace, rank_info, world)
        deadline.restart(SETUP)
        trace.start("teardown")
        hooks.teardown(world)


@contextmanager
def lab_of(subject: Subject, folder: Path, extensions: Mapping[str, object] | None = None) -> Iterator[Lab]:
    """A world of its own for one measurement, left at the end."""
    rank_info, config = join(os.environ) or RankInfo(), _on_device(subject.config)
    hooks = Hooks(config.strategy, subject.make(config), extensions)
    world = hooks.setup(config, rank_info)
    yield Lab(hooks=hooks, base=config, world=world, rank_info=rank_info, folder=folder)
    hooks.teardown(world)


def name_of(subject: int, case: int) -> str:
    """The name of a case's files."""
    return f"{subject}-{case}"


def finding_file(folder: Path, name: str, rank: int) -> Path:
    """Where a rank leaves what it found."""
    return folder / f"finding-{name}-{rank}.json"


def _serve_case(
    assignment: Assignment, number: int, index: int, trace: Trace, rank_info: RankInfo, world: World
) -> None:
    subject, name = assignment.subjects[number], name_of(number, index)
    scratch = assignment.folder / f"case-{name}"
    scratch.mkdir(exist_ok=True)
    finding = _measure(subject, subject.cases[index], trace, rank_info, world, scratch)
    write_atomically(finding_file(assignment.folder, name, rank_info.rank), json.dumps(asdict(finding)))
    if finding.held is False:
        _await_others(assignment.folder, name, world)


def _measure(subject: Subject, case: Case, trace: Trace, rank_info: RankInfo, world: World, scratch: Path) -> Finding:
    try:
        hooks, config = _hooks(subject, trace), _on_device(subject.config)
        return case.found(case.measure(Lab(hooks=hooks, base=config, world=world, rank_info=rank_info, folder=scratch)))
    except Skip as reason:
        return case.skipped(str(reason))
    except DistcoreError as error:
        return case.broken(one_line(str(error)))
    except Exception as error:  # whatever a strategy raises is a finding, and the other cases go on
        return case.broken(one_line(f"{type(error).__name__}: {error}"))


def _await_others(folder: Path, name: str, world: World) -> None:
    """End this rank if others are stuck in a collective of the case that failed here."""
    files = [finding_file(folder, name, rank) for rank in range(world.size)]
    await_true(lambda: all(file.exists() for file in files), GRACE, "the case failed on this rank alone")


def _hooks(subject: Subject, trace: Trace) -> Hooks:
    return Hooks(subject.config.strategy, subject.make(subject.config), {"trace": trace.extension()})


def _on_device(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"device": resolve_device(config)})


class _Deadline:
    """Ends this process with its stacks written when a case takes longer than its limit, whatever it hangs in."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self._limit = assignment.limit
        self._file = (assignment.folder / f"stacks-{rank}.txt").open("w")

    def __enter__(self) -> _Deadline:
        self.restart(SETUP)
        return self

    def restart(self, limit: float | None = None) -> None:
        faulthandler.dump_traceback_later(limit or self._limit, exit=True, file=self._file)

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
