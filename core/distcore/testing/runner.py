"""Starting ranks for the cases: one launch for all of them, and another only where a case took the ranks down."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from distcore.config import load_config
from distcore.errors import DistcoreError, RankError, StrategyError, nearest
from distcore.launchers import launch
from distcore.launchers.failures import one_line
from distcore.plugin.hooks import capabilities_of
from distcore.plugin.shorthand import expand_shorthand
from distcore.testing.cases import JOB_CASES, Case, Finding, Skip, all_cases, merged
from distcore.testing.rank import SETUP, Assignment, Subject, finding_file, name_of, serve
from distcore.testing.trace import positions, who_is_stuck

LIMIT = 60.0
"""Seconds that one case may take."""


def check(
    strategy: str,
    nproc: int = 2,
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    only: Iterable[str] = (),
    limit: float = LIMIT,
) -> list[Finding]:
    """Measure the laws against an installed strategy with ``nproc`` ranks; one finding a case, in their order.

    ``options`` are the strategy's, ``settings`` other config keys by dotted name; ``only`` names some of the cases.
    Raises DistcoreError where the strategy cannot even be built or its ranks cannot be set up.
    """
    changes = {"strategy": strategy, **{f"strategy_options.{name}": value for name, value in (options or {}).items()}}
    config = expand_shorthand(load_config(None, changes | dict(settings or {})))
    subject = Subject(config=config, cases=tuple(_chosen(only)))
    if capabilities_of(config.strategy, subject.make(config)).processes == "one":
        nproc = 1
    return measure([replace(subject, config=config.model_copy(update={"nproc": nproc}))], nproc, limit)[0]


def measure(subjects: list[Subject], nproc: int, limit: float = LIMIT) -> list[list[Finding]]:
    """Measure several subjects in one launch of ``nproc`` ranks; for each, a finding for each of its cases."""
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        work = _Work(tuple(subjects), nproc, Path(folder), limit)
        for number, subject in enumerate(subjects):
            work.plan(number, subject)
        while work.todo:
            work.launch()
        return [[work.found[number, case] for case in range(len(s.cases))] for number, s in enumerate(subjects)]


def _chosen(only: Iterable[str]) -> Iterator[Case]:
    cases = all_cases()
    for name in only:
        if name not in cases:
            raise StrategyError(f"no case named {name!r}{nearest(name, cases)} (cases: {', '.join(cases)})")
    wanted = set(only)
    return (case for name, case in cases.items() if not wanted or name in wanted)


def _measured(case: Case, subject: Subject) -> Finding:
    try:
        return case.found(case.measure(subject))
    except Skip as reason:
        return case.skipped(str(reason))
    except (DistcoreError, subprocess.TimeoutExpired) as error:
        return case.broken(one_line(str(error)))


@dataclass
class _Work:
    """What is left to measure, and what was found."""

    subjects: tuple[Subject, ...]
    nproc: int
    folder: Path
    limit: float
    todo: list[tuple[int, int]] = field(default_factory=list)
    found: dict[tuple[int, int], Finding] = field(default_factory=dict)

    def plan(self, number: int, subject: Subject) -> None:
        """Skip what the strategy declares not to keep; measure here what starts processes; leave the rest to ranks."""
        exempt = capabilities_of(subject.config.strategy, subject.make(subject.config)).exempt
        for index, case in enumerate(subject.cases):
            reason = exempt.get(case.name) or exempt.get(case.law)
            if reason:
                self.found[number, index] = case.skipped(reason)
            elif case.name in JOB_CASES:
                self.found[number, index] = _measured(case, subject)
            else:
                self.todo.append((number, index))

    def launch(self) -> None:
        """Run what is left in new ranks, up to the first case that takes them down."""
        for heavy in ("transformers.optimization", "torch._dynamo"):  # once, here, not in every rank that is forked
            import_module(heavy)
        assignment = Assignment(subjects=self.subjects, todo=tuple(self.todo), folder=self.folder, limit=self.limit)
        for stale in self.folder.glob("position-*"):
            stale.unlink()
        try:
            launch(serve, assignment, nproc=self.nproc, timeout=len(self.todo) * self.limit + 2 * SETUP)
        except DistcoreError as error:
            self._take_down(error)
        self._collect()

    def _take_down(self, error: DistcoreError) -> None:
        """Record the case in which ranks ended, with what they said; raises where it was in none."""
        seen = positions(self.folder, self.nproc)
        current = next((pair for pair in self.todo if name_of(*pair) in {p.case for p in seen.values()}), None)
        stacks = [file for file in self.folder.glob("stacks-*.txt") if file.stat().st_size]
        if current is None:
            raise RankError(f"{error}; {who_is_stuck(seen)}") if stacks and seen else error
        case = self.subjects[current[0]].cases[current[1]]
        told = self._read(current)
        why = f"after {self.limit:g} s {who_is_stuck(seen)}" if stacks else str(error)
        for file in stacks:
            file.unlink()
        broken = [finding for finding in told if finding.held is False]
        self.found[current] = replace(broken[0], note=f"{broken[0].note}; {why}") if broken else case.broken(why)

    def _collect(self) -> None:
        for pair in list(self.todo):
            told = self._read(pair)
            if len(told) == self.nproc:
                self.found.setdefault(pair, merged(told))
        left = [pair for pair in self.todo if pair not in self.found]
        if len(left) == len(self.todo):
            raise RankError("the ranks ended without a finding")
        self.todo = left

    def _read(self, pair: tuple[int, int]) -> list[Finding]:
        files = [finding_file(self.folder, name_of(*pair), rank) for rank in range(self.nproc)]
        return [Finding(**json.loads(file.read_text())) for file in files if file.exists()]
