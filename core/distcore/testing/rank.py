"""One rank of a measurement: for each strategy join the world, run its cases,
write findings, and leave.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from distcore.config import RunConfig, with_changes
from distcore.distributed.devices import resolve_device
from distcore.files import write_atomically
from distcore.plugin.strategy.contract import RankInfo, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment.environment import join
from distcore.testing.findings import ALONE
from distcore.testing.lab import Lab
from distcore.testing.store import await_true, store_for
from distcore.testing.subject import Subject
from distcore.testing.trace import Trace

SETUP = 120.0
"""Seconds that a backend may take to start, or to leave: it may have much to import."""
GRACE = 2.0
"""Seconds that a rank with a failed case waits for the others to fail, too, before
it ends the job.
"""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The work of one launch. ``todo`` has pairs of subject and case number, sorted by subject."""

    subjects: tuple[Subject, ...]
    """The strategies under test; ``todo`` counts them from 0."""
    todo: tuple[tuple[int, int], ...]
    """Pairs of subject and case, both by number from 0."""
    folder: Path
    """Shared by all ranks: positions, findings and the scratch folders of the cases."""
    limit: float
    """Seconds that one case may take; after them the rank writes its stack and exits."""


def serve(assignment: Assignment) -> None:
    """Measure in this rank; one file for each case and rank holds the finding.

    The subjects follow each other in the same processes. Each joins a world of its
    own and leaves it.
    """
    rank_info = join(os.environ) or RankInfo()
    trace = Trace(assignment.folder, rank_info.rank)
    cases_by_subject: dict[int, list[int]] = {}
    for number, case in assignment.todo:
        cases_by_subject.setdefault(number, []).append(case)
    with _Deadline(assignment, rank_info.rank) as deadline:
        for turn, (number, cases) in enumerate(cases_by_subject.items()):
            deadline.restart(SETUP)
            trace.start(setup_of(number))
            with store_for(turn, assignment.folder, rank_info, SETUP):
                _serve_subject(assignment, number, cases, trace, deadline)


@contextmanager
def lab_of(
    subject: Subject, folder: Path, extensions: Mapping[str, object] | None = None
) -> Iterator[Lab]:
    """Join a world for one measurement in this rank, and leave it at the end."""
    rank_info = join(os.environ) or RankInfo()
    config = _on_device(subject.config)

    def hooks_with(more: Mapping[str, object]) -> Hooks:
        all_extensions = {**(extensions or {}), **more}
        return Hooks(config.strategy, subject.strategy().plugin, all_extensions)

    hooks = hooks_with({})
    world = hooks.setup(config, rank_info)
    yield Lab(
        hooks=hooks,
        base=config,
        world=world,
        rank_info=rank_info,
        folder=folder,
        hooks_with=hooks_with,
        shape=subject.shape,
    )
    hooks.teardown(world)


name_of = "{}-{}".format
"""The name of a case in positions and files, by the numbers of subject and case."""
setup_of = "setup-{}".format
"""The name of a subject's start in positions."""
teardown_of = "teardown-{}".format
"""The name of a subject's end in positions."""


def finding_file(folder: Path, name: str, rank: int) -> Path:
    """Where ``rank`` writes the finding of case ``name``, as JSON."""
    return folder / f"finding-{name}-{rank}.json"


def _serve_subject(
    assignment: Assignment, number: int, cases: list[int], trace: Trace, deadline: _Deadline
) -> None:
    """Join a world of the subject's own, measure its cases one after the other, and leave it."""
    subject = assignment.subjects[number]
    # Anew: the store of this subject has a port of its own.
    rank_info = join(os.environ) or RankInfo()
    hooks = _hooks(subject, trace)
    world = hooks.setup(_on_device(subject.config), rank_info)
    for case in cases:
        deadline.restart()
        trace.start(name_of(number, case))
        _serve_case(assignment, number, case, trace, rank_info, world)
    deadline.restart(SETUP)
    trace.start(teardown_of(number))
    hooks.teardown(world)


def _serve_case(
    assignment: Assignment, number: int, index: int, trace: Trace, rank_info: RankInfo, world: World
) -> None:
    """Measure a case and write this rank's finding; raise if only this rank has ended the case."""
    subject = assignment.subjects[number]
    name = name_of(number, index)
    scratch = assignment.folder / f"case-{name}"
    scratch.mkdir(exist_ok=True)
    lab = Lab(
        hooks=_hooks(subject, trace),
        base=_on_device(subject.config),
        world=world,
        rank_info=rank_info,
        folder=scratch,
        hooks_with=partial(_hooks, subject, trace),
        shape=subject.shape,
    )
    finding = subject.cases[index].measure_in(lab)
    files = [finding_file(assignment.folder, name, rank) for rank in range(world.size)]
    write_atomically(files[rank_info.rank], json.dumps(asdict(finding)))
    if finding.held is False or finding.note.startswith(ALONE):
        # If other ranks do not end the case, they are stuck in a collective.
        await_true(
            lambda: all(file.exists() for file in files),
            GRACE,
            "the case ended on this rank alone",
        )


def _hooks(subject: Subject, trace: Trace, extensions: Mapping[str, object] | None = None) -> Hooks:
    """Return hooks of the strategy under test that also record where this rank is."""
    strategy = subject.strategy()
    all_extensions = {"trace": trace.extension(), **(extensions or {})}
    return Hooks(strategy.name, strategy.plugin, all_extensions)


def _on_device(config: RunConfig) -> RunConfig:
    """Return ``config`` with the device of this rank."""
    return with_changes(config, {"device": resolve_device(config)})


class _Deadline:
    """Ends this process with its stacks written when a case takes longer than its limit,
    whatever it hangs in.
    """

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
