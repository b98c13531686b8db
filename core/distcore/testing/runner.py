"""Start ranks for the cases: one launch for all, and a new one only after a case
took the ranks down.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from threading import Event

from distcore.errors import DistcoreError, RankError
from distcore.launchers import launch
from distcore.testing.findings import ALONE, Case, Finding, Report, merged
from distcore.testing.fresh import foreign_modules
from distcore.testing.lab import JobLab
from distcore.testing.rank import (
    SETUP,
    Assignment,
    finding_file,
    name_of,
    serve,
    setup_of,
    teardown_of,
)
from distcore.testing.subject import Subject
from distcore.testing.trace import positions, who_is_stuck

LIMIT = 60.0
"""Seconds that one case may take."""
HANGS = 3
"""Cases of a strategy that may take longer; after them the others are not measured."""


def measure_each(
    subjects: Sequence[Subject], limit: float = LIMIT, report: Report = id
) -> list[list[Finding] | DistcoreError]:
    """Measure subjects with the same number of ranks in the same processes, one after another.

    Returns for each the findings of its cases, or the error of its setup or teardown. A case that
    takes the ranks down is broken; new ranks measure the remaining cases.
    """
    results: dict[int, list[Finding] | DistcoreError] = {}
    for nproc in dict.fromkeys(int(subject.config.nproc) for subject in subjects):
        numbers = [
            number for number, subject in enumerate(subjects) if subject.config.nproc == nproc
        ]
        with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
            work = _Work(
                tuple(subjects[number] for number in numbers), nproc, Path(folder), limit, report
            )
            results |= dict(zip(numbers, work.do(), strict=True))
    return [results[number] for number in range(len(subjects))]


@dataclass
class _Work:
    """Subjects with the same number of ranks, with their open cases, findings and failures."""

    subjects: tuple[Subject, ...]
    nproc: int
    folder: Path
    limit: float
    report: Report
    todo: list[tuple[int, int]] = field(default_factory=list)
    """Subject and case, by number."""
    findings: dict[tuple[int, int], Finding] = field(default_factory=dict)
    failed: dict[int, DistcoreError] = field(default_factory=dict)
    hung: Counter[int] = field(default_factory=Counter)
    """Cases that took too long, by subject."""

    def do(self) -> list[list[Finding] | DistcoreError]:
        """Measure everything; for each subject its findings or its error."""
        import_module("torch._dynamo")  # once, here, not in every rank that is forked
        for number, subject in enumerate(self.subjects):
            try:
                self._plan(number, subject)
            except DistcoreError as error:
                self._fail(number, error)
        while self.todo:
            self._launch()
        return [
            self.failed.get(number) or self._findings(number)
            for number in range(len(self.subjects))
        ]

    def _findings(self, number: int) -> list[Finding]:
        """Return the findings of a subject in the order of its cases."""
        cases = self.subjects[number].cases
        return [self.findings[number, case] for case in range(len(cases))]

    def _plan(self, number: int, subject: Subject) -> None:
        for index, case in enumerate(subject.cases):
            if case.is_job:
                self._keep((number, index), self._measure_here(number, case))
            else:
                self.todo.append((number, index))

    def _measure_here(self, number: int, case: Case) -> Finding:
        lab = JobLab(subject=self.subjects[number], foreign_modules=lambda: self._foreign[number])
        return case.measure_in(lab)

    @cached_property
    def _foreign(self) -> list[list[str] | str]:
        """For all subjects at once: an interpreter takes seconds to start."""
        return foreign_modules([subject.config for subject in self.subjects])

    def _launch(self) -> None:
        assignment = Assignment(
            subjects=self.subjects, todo=tuple(self.todo), folder=self.folder, limit=self.limit
        )
        for pattern in ("position-*", "store-*", "left-*"):
            for stale in self.folder.glob(pattern):
                stale.unlink()
        before, ended, failure = tuple(self.todo), Event(), None
        timeout = len(before) * self.limit + 2 * SETUP * len({number for number, _ in before})
        with ThreadPoolExecutor(1) as watch:
            watching = watch.submit(self._watch, ended)
            try:
                launch(serve, assignment, nproc=self.nproc, timeout=timeout)
            except DistcoreError as error:
                failure = error
            finally:
                ended.set()
            watching.result()
        if failure:
            self._explain(failure, before)
        self._collect(set())
        if len(self.todo) == len(before):  # the next launch would come no further
            for number in {number for number, _ in self.todo}:
                self._fail(number, RankError("the ranks ended without a finding"))

    def _watch(self, ended: Event) -> None:
        while not ended.wait(0.2):
            with suppress(ValueError):  # a rank is just writing its position
                self._collect(
                    {position.case for position in positions(self.folder, self.nproc).values()}
                )

    def _explain(self, error: DistcoreError, launched: Sequence[tuple[int, int]]) -> None:
        seen = positions(self.folder, self.nproc)
        at = {position.case for position in seen.values()}
        stacks = [file for file in self.folder.glob("stacks-*.txt") if file.stat().st_size]
        current = next((pair for pair in self.todo if name_of(*pair) in at), None)
        if current:
            self._break(
                current, f"after {self.limit:g} s {who_is_stuck(seen)}" if stacks else str(error)
            )
        else:
            why = RankError(f"{error}; {who_is_stuck(seen)}") if stacks and seen else error
            begun = {
                number for number, _ in launched if at & {setup_of(number), teardown_of(number)}
            }
            for number in begun or {number for number, _ in launched}:
                self._fail(number, why)
        if current and stacks and self.findings[current].held is False:
            self._count_hang(current[0])
        for file in stacks:
            file.unlink()

    def _break(self, pair: tuple[int, int], why: str) -> None:
        """Keep the finding of a case that took the ranks down: broken, unless a refusal did."""
        case = self.subjects[pair[0]].cases[pair[1]]
        written = self._read(pair)
        broken = [finding for finding in written if finding.held is False]
        refused = [finding for finding in written if finding.note.startswith(ALONE)]
        if refused:  # the others then lose their connections, and find that broken
            self._keep(pair, refused[0])
        elif broken:
            self._keep(pair, replace(broken[0], note=f"{broken[0].note}; {why}"))
        else:
            self._keep(pair, case.finding(False, why))

    def _count_hang(self, number: int) -> None:
        self.hung[number] += 1
        for pair in [
            pair for pair in self.todo if pair[0] == number and self.hung[number] == HANGS
        ]:
            self._keep(
                pair,
                self.subjects[number]
                .cases[pair[1]]
                .finding(None, f"not measured: {HANGS} cases hung before"),
            )

    def _keep(self, pair: tuple[int, int], measured: Finding) -> None:
        subject = self.subjects[pair[0]]
        must_break = subject.must_break(measured.case)
        self.findings[pair] = finding = measured.excused(subject.exempt, must_break)
        self.todo = [other for other in self.todo if other != pair]
        self.report(finding)

    def _fail(self, number: int, error: DistcoreError) -> None:
        self.failed[number] = error
        self.todo = [pair for pair in self.todo if pair[0] != number]

    def _collect(self, but: Collection[str]) -> None:
        for pair in self.todo:
            written = self._read(pair) if name_of(*pair) not in but else []
            if len(written) == self.nproc:
                self._keep(pair, merged(written))

    def _read(self, pair: tuple[int, int]) -> list[Finding]:
        files = [finding_file(self.folder, name_of(*pair), rank) for rank in range(self.nproc)]
        return [Finding(**json.loads(file.read_text())) for file in files if file.exists()]
