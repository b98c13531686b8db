"""The laws as pytest tests; the one module here that imports pytest.

The tests of a strategy subclass ``StrategyContract``, those of a task ``TaskContract``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

import pytest

from distcore.errors import DistcoreError
from distcore.testing.findings import Finding
from distcore.testing.register import all_cases, own_module_cases, task_cases
from distcore.testing.runner import LIMIT, check_task, measure_each, subject_of
from distcore.testing.subject import Subject

PER_LAUNCH = 2
"""Classes that are measured in the same processes."""


class StrategyContract:
    """One test per case. Ranks start with the first test, and measure all cases of the session.

    Classes of one module with the same strategy, ranks, limit, marks and fixtures share processes,
    because starting ranks takes longer than most cases.
    """

    strategy: ClassVar[str]
    """Name of an installed strategy."""
    options: ClassVar[Mapping[str, Any]] = {}
    """The strategy's options."""
    nproc: ClassVar[int] = 2
    """Ranks; a strategy that declares one process gets one."""
    alone: ClassVar[bool] = False
    """Give this class ranks of its own: for options under which a backend keeps gigabytes
    until its process ends.
    """
    limit: ClassVar[float] = LIMIT
    """Seconds that one case may take before the ranks are ended and the stuck one is named."""

    @pytest.mark.parametrize("case", all_cases())
    def test_law(self, case: str, request: pytest.FixtureRequest) -> None:
        """A broken law fails with its error, its bound and where it was seen; an exempt case
        must break, and skips.
        """
        _report(_outcome(request, case, self.limit))

    @pytest.mark.parametrize("case", own_module_cases())
    def test_own_module(self, case: str, request: pytest.FixtureRequest) -> None:
        """A module of a user's own trains as in plain PyTorch; where the run is refused in
        one line, the test skips with that line.
        """
        _report(_outcome(request, case, self.limit))


class TaskContract:
    """One test per case. The first test measures all cases of its class."""

    task: ClassVar[str]
    """Name of an installed task, or ``file.py:Class``."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Config keys by dotted name, such as ``{"task_options.model": "small"}``."""

    @pytest.mark.parametrize("case", task_cases())
    def test_law(self, case: str) -> None:
        """A broken law fails with its error, its bound and where it was seen; an exempt case
        must break, and skips.
        """
        _report(_measure_task(self.task, *sorted(self.settings.items()))[case])


@cache
def _measure_task(task: str, *settings: tuple[str, Any]) -> dict[str, Finding]:
    return {finding.case: finding for finding in check_task(task, dict(settings))}


Outcomes = dict[tuple[type[Any], str], Finding | DistcoreError]
"""The finding by class and case, or the error that prevented the measurement."""
_OUTCOMES = pytest.StashKey[Outcomes]()
"""Of a session; errors are kept too, so that no second test starts the ranks again."""


def _report(outcome: Finding | DistcoreError) -> None:
    if isinstance(outcome, DistcoreError):
        raise outcome
    if outcome.held is None:
        pytest.skip(outcome.note)
    if not outcome.held:
        pytest.fail(str(outcome), pytrace=False)


def _outcome(request: pytest.FixtureRequest, case: str, limit: float) -> Finding | DistcoreError:
    """Return the outcome of a case; the first one measures what shares its ranks, too."""
    outcomes = request.session.stash.setdefault(_OUTCOMES, {})
    if (request.cls, case) not in outcomes:
        key = _key(request.node)
        together = [it for it in request.session.items if _is_case(it) and _key(it) == key]
        outcomes |= _measure(together, limit)
    return outcomes[request.cls, case]


def _is_case(item: Any) -> bool:
    """Return True for a test of a contract, not for one that a subclass has beside them."""
    tested = getattr(item, "cls", None)
    is_contract = tested is not None and issubclass(tested, StrategyContract)
    return is_contract and item.originalname in ("test_law", "test_own_module")


def _key(item: Any) -> tuple[object, ...]:
    marks = sorted(repr(mark) for mark in item.iter_markers() if mark.name != "parametrize")
    tested = item.cls
    group = tested if tested.alone else None
    return (
        item.module,
        tested.strategy,
        tested.nproc,
        tested.limit,
        group,
        marks,
        sorted(item.fixturenames),
    )


def _measure(items: Iterable[Any], limit: float) -> Outcomes:
    asked: dict[type[Any], list[str]] = {}
    for item in items:
        asked.setdefault(item.cls, []).append(item.callspec.params["case"])
    outcomes: Outcomes = {}
    subjects: dict[type[Any], Subject] = {}
    for tested, cases in asked.items():
        try:
            subjects[tested] = subject_of(tested.strategy, tested.nproc, tested.options, only=cases)
        except DistcoreError as error:
            outcomes |= {(tested, case): error for case in cases}
    for tested, findings in _in_turns(subjects, limit):
        if isinstance(findings, DistcoreError):
            outcomes |= {(tested, case): findings for case in asked[tested]}
        else:
            outcomes |= {(tested, finding.case): finding for finding in findings}
    return outcomes


def _in_turns(
    subjects: dict[type[Any], Subject], limit: float
) -> Iterator[tuple[type[Any], list[Finding] | DistcoreError]]:
    """Measure a few at a time: permanent memory of backends, such as large buffers,
    must not add up.
    """
    classes = [*subjects]
    for start in range(0, len(classes), PER_LAUNCH):
        group = classes[start : start + PER_LAUNCH]
        yield from zip(
            group, measure_each([subjects[tested] for tested in group], limit), strict=True
        )
