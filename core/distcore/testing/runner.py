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
from distcore.testing.trace import Position, positions, who_is_stuck

LIMIT = 60.0
"""Seconds that one case may take."""
HANGS = 3
"""So many cases of a strategy may take longer; its remaining cases are then not measured."""
_CasePlace = tuple[int, int]
"""The number of a subject, and that of one of its cases, both from 0."""


def measure_each(
    subjects: Sequence[Subject], limit: float = LIMIT, report: Report = id
) -> list[list[Finding] | DistcoreError]:
    """Measure subjects with the same number of ranks in the same processes, one after another.

    Returns for each the findings of its cases, or the error of its setup or teardown. A case that
    takes the ranks down is broken; new ranks measure the remaining cases.
    """
    numbers_by_nproc: dict[int, list[int]] = {}
    for number, subject in enumerate(subjects):
        numbers_by_nproc.setdefault(int(subject.config.nproc), []).append(number)
    results: dict[int, list[Finding] | DistcoreError] = {}
    for nproc, numbers in numbers_by_nproc.items():
        alike = tuple(subjects[number] for number in numbers)
        with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
            work = _Work(alike, nproc, Path(folder), limit, report)
            results_of_alike = work.do()
        results |= dict(zip(numbers, results_of_alike, strict=True))
    return [results[number] for number in range(len(subjects))]


@dataclass
class _Work:
    """Subjects with the same number of ranks, with their open cases, findings and failures."""

    subjects: tuple[Subject, ...]
    nproc: int
    folder: Path
    limit: float
    report: Report
    todo: list[_CasePlace] = field(default_factory=list)
    """The open cases, sorted by subject."""
    findings: dict[_CasePlace, Finding] = field(default_factory=dict)
    failed: dict[int, DistcoreError] = field(default_factory=dict)
    """Errors of setup and teardown, by subject."""
    hung: Counter[int] = field(default_factory=Counter)
    """Cases that took too long, by subject."""

    def do(self) -> list[list[Finding] | DistcoreError]:
        """Measure all subjects; return for each its findings or its error."""
        # Here, before the ranks are forked, so that not each of them imports it.
        import_module("torch._dynamo")
        for number, subject in enumerate(self.subjects):
            try:
                self._plan(number, subject)
            except DistcoreError as error:
                self._fail(number, error)
        while self.todo:
            self._launch()
        return [self._result(number) for number in range(len(self.subjects))]

    def _result(self, number: int) -> list[Finding] | DistcoreError:
        """Return the error of a subject, or else its findings."""
        if number in self.failed:
            return self.failed[number]
        return self._findings(number)

    def _findings(self, number: int) -> list[Finding]:
        """Return the findings of a subject in the order of its cases."""
        cases = self.subjects[number].cases
        return [self.findings[number, case] for case in range(len(cases))]

    def _plan(self, number: int, subject: Subject) -> None:
        """Note a subject's cases as open; measure at once those that start ranks of their own."""
        for index, case in enumerate(subject.cases):
            if case.is_job:
                self._keep((number, index), self._measure_here(number, case))
            else:
                self.todo.append((number, index))

    def _measure_here(self, number: int, case: Case) -> Finding:
        """Measure a case that starts ranks of its own."""
        # A function, because most cases do not ask for the modules, which take seconds to find.
        lab = JobLab(subject=self.subjects[number], foreign_modules=lambda: self._foreign[number])
        return case.measure_in(lab)

    @cached_property
    def _foreign(self) -> list[list[str] | str]:
        """The foreign modules of all subjects, found by one new interpreter: it takes seconds to
        start.
        """
        return foreign_modules([subject.config for subject in self.subjects])

    def _launch(self) -> None:
        """Start ranks for the open cases, and keep what they find, also if they do not come to an
        end.
        """
        launched = tuple(self.todo)
        assignment = Assignment(
            subjects=self.subjects, todo=launched, folder=self.folder, limit=self.limit
        )
        # Files of an earlier launch: the new ranks' stores and positions would be confused with
        # those of ranks that are gone.
        for pattern in ("position-*", "store-*", "left-*"):
            for stale in self.folder.glob(pattern):
                stale.unlink()
        subjects_launched = {number for number, _ in launched}
        limit_of_cases = len(launched) * self.limit
        limit_of_setups_and_teardowns = 2 * SETUP * len(subjects_launched)
        ended = Event()
        failure: DistcoreError | None = None
        with ThreadPoolExecutor(1) as watch:
            watching = watch.submit(self._watch, ended)
            try:
                launch(
                    serve,
                    assignment,
                    nproc=self.nproc,
                    timeout=limit_of_cases + limit_of_setups_and_teardowns,
                )
            except DistcoreError as error:
                failure = error
            finally:
                ended.set()
            watching.result()
        if failure:
            self._explain(failure, launched)
        self._collect(running=set())
        # Without progress the next launch would end as this one did, and so would all after it.
        if len(self.todo) == len(launched):
            for number in {number for number, _ in self.todo}:
                self._fail(number, RankError("the ranks ended without a finding"))

    def _watch(self, ended: Event) -> None:
        """Report each case soon after its end, until the ranks have ended."""
        while not ended.wait(0.2):
            # A position cannot be read while its rank writes it; the next look will read it.
            with suppress(ValueError):
                last_positions = positions(self.folder, self.nproc)
                self._collect(running={position.case for position in last_positions.values()})

    def _explain(self, error: DistcoreError, launched: Sequence[_CasePlace]) -> None:
        """Charge the failure of a launch to the case that was running, or else to the subjects
        that were starting or leaving.
        """
        last_positions = positions(self.folder, self.nproc)
        running = {position.case for position in last_positions.values()}
        # A rank writes its stacks when the time of a case, a setup or a teardown is up.
        stacks = [file for file in self.folder.glob("stacks-*.txt") if file.stat().st_size]
        current = next((place for place in self.todo if name_of(*place) in running), None)
        if current is not None:
            self._explain_by_case(current, error, last_positions if stacks else {})
        else:
            if stacks and last_positions:
                error = RankError(f"{error}; {who_is_stuck(last_positions)}")
            subjects_launched = {number for number, _ in launched}
            starting_or_leaving = {
                number
                for number in subjects_launched
                if setup_of(number) in running or teardown_of(number) in running
            }
            for number in starting_or_leaving or subjects_launched:
                self._fail(number, error)
        for file in stacks:
            file.unlink()

    def _explain_by_case(
        self, place: _CasePlace, error: DistcoreError, stuck: dict[int, Position]
    ) -> None:
        """Keep the finding of the case that was running when a launch failed with ``error``.

        ``stuck``: the ranks' positions, if the case took too long; else empty.
        """
        if not stuck:
            self._break(place, str(error))
            return
        self._break(place, f"after {self.limit:g} s {who_is_stuck(stuck)}")
        # A case that one rank refused, or that is exempt, is skipped, and counts as no hang.
        if self.findings[place].held is False:
            self._count_hang(place[0])

    def _break(self, place: _CasePlace, why: str) -> None:
        """Keep the finding of a case that took the ranks down: broken, unless a refusal did."""
        written = self._read(place)
        refused = [finding for finding in written if finding.note.startswith(ALONE)]
        broken = [finding for finding in written if finding.held is False]
        if refused:
            # Before those of other ranks: they broke because they lost their connections to the
            # one that refused.
            self._keep(place, refused[0])
        elif broken:
            self._keep(place, replace(broken[0], note=f"{broken[0].note}; {why}"))
        else:
            self._keep(place, self._case(place).finding(False, why))

    def _count_hang(self, number: int) -> None:
        """Count a case of a subject that took too long; the last that may do so ends the others."""
        self.hung[number] += 1
        if self.hung[number] != HANGS:
            return
        open_cases = [place for place in self.todo if place[0] == number]
        for place in open_cases:
            reason = f"not measured: {HANGS} cases hung before"
            self._keep(place, self._case(place).finding(None, reason))

    def _case(self, place: _CasePlace) -> Case:
        number, index = place
        return self.subjects[number].cases[index]

    def _keep(self, place: _CasePlace, measured: Finding) -> None:
        """Keep and report the finding of a case, which is then no longer open."""
        number, _ = place
        subject = self.subjects[number]
        finding = measured.excused(subject.exempt, subject.must_break(measured.case))
        self.findings[place] = finding
        self.todo = [other for other in self.todo if other != place]
        self.report(finding)

    def _fail(self, number: int, error: DistcoreError) -> None:
        """Give up a subject: its open cases are not measured."""
        self.failed[number] = error
        self.todo = [place for place in self.todo if place[0] != number]

    def _collect(self, running: Collection[str]) -> None:
        """Keep the findings of open cases that all ranks have written.

        Not those of ``running`` cases, by name: such a case may still take the ranks down.
        """
        # _keep makes self.todo anew, so this walks over the cases that were open at its begin.
        for place in self.todo:
            if name_of(*place) in running:
                continue
            written = self._read(place)
            if len(written) == self.nproc:
                self._keep(place, merged(written))

    def _read(self, place: _CasePlace) -> list[Finding]:
        """Return the findings of a case that ranks have written so far, in rank order."""
        files = [finding_file(self.folder, name_of(*place), rank) for rank in range(self.nproc)]
        return [Finding(**json.loads(file.read_text())) for file in files if file.exists()]
