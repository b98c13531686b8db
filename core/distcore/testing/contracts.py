"""The laws as pytest tests; the one module here that imports pytest.

The tests of a strategy subclass ``StrategyContract``, those of a task ``TaskContract``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from distcore.errors import DistcoreError
from distcore.testing.findings import Finding
from distcore.testing.runner import LIMIT
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.subject import Subject
from distcore.testing.task_suite import TASKS

PER_LAUNCH = 2
"""Classes that are measured in the same processes."""
Asked = dict[type[Any], list[str]]
"""The cases that tests ask for, by the class of the tests."""
Outcomes = dict[tuple[type[Any], str], Finding | DistcoreError]
"""The finding by class and case, or the error that prevented the measurement."""
LAW_TESTS = ("test_law", "test_own_module")
"""Names of the tests that contracts have of ``law_test``."""
_OUTCOMES = pytest.StashKey[Outcomes]()
"""Of a session; errors are kept too, so that no second test measures again."""


def law_test(cases: Iterable[str]) -> Callable[..., None]:
    """Return the test of a contract, with one case of a suite per parameter. The first measures
    what all tests of the session ask for that can be measured together.
    """

    @pytest.mark.parametrize("case", list(cases))
    def test(self: Contract, case: str, request: pytest.FixtureRequest) -> None:
        """A broken law fails with its error, its bound and where it was seen; an exempt case
        must break, and skips.
        """
        outcomes = request.session.stash.setdefault(_OUTCOMES, {})
        if (type(self), case) not in outcomes:
            outcomes |= self.measure(_asked_together(request.node))
        report_to_pytest(outcomes[type(self), case])

    return test


class Contract:
    """The tests of the laws of one plugin: ``law_test`` of the cases of a suite."""

    @classmethod
    def measured_with(cls) -> object:
        """Return a key that is equal for classes which are measured together: here the class."""
        return cls

    @staticmethod
    def measure(asked: Asked) -> Outcomes:
        """Measure cases of classes with one key."""
        raise NotImplementedError


class StrategyContract(Contract):
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

    test_law = law_test(STRATEGIES.required)
    """The laws' own models."""
    test_own_module = law_test(STRATEGIES.own_modules)
    """Modules of a user's own; where the run is refused in one line, the test skips with it."""

    @classmethod
    def measured_with(cls) -> object:
        """Return what ranks have in common that measure several classes."""
        return cls.strategy, cls.nproc, cls.limit, cls if cls.alone else None

    @staticmethod
    def measure(asked: Asked) -> Outcomes:
        """Measure the strategies of these classes in shared ranks."""
        outcomes: Outcomes = {}
        subjects: dict[type[Any], Subject] = {}
        for tested, cases in asked.items():
            try:
                subjects[tested] = STRATEGIES.subject(
                    tested.strategy, tested.nproc, tested.options, only=cases
                )
            except DistcoreError as error:
                outcomes |= {(tested, case): error for case in cases}
        for tested, findings in _in_turns(subjects):
            outcomes |= _by_case(tested, asked[tested], findings)
        return outcomes


class TaskContract(Contract):
    """One test per case. The first test measures all cases of its class."""

    task: ClassVar[str]
    """Name of an installed task, or ``file.py:Class``."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Config keys by dotted name, such as ``{"task_options.model": "small"}``."""

    test_law = law_test(TASKS.cases)
    """Every case of a task."""

    @staticmethod
    def measure(asked: Asked) -> Outcomes:
        """Measure the task of each class in this process."""
        outcomes: Outcomes = {}
        for tested, cases in asked.items():
            try:
                findings = TASKS.measure(tested.task, tested.settings, cases)
            except DistcoreError as error:
                outcomes |= _by_case(tested, cases, error)
            else:
                outcomes |= _by_case(tested, cases, findings)
        return outcomes


def report_to_pytest(outcome: Finding | DistcoreError) -> None:
    """End a test as its case ended: it fails where a law is broken, with one line, and skips
    what was not measured.
    """
    if isinstance(outcome, DistcoreError):
        raise outcome
    if outcome.held is None:
        pytest.skip(outcome.note)
    if not outcome.held:
        pytest.fail(str(outcome), pytrace=False)


def _asked_together(item: Any) -> Asked:
    """Return what the tests of a session ask for that can be measured with this one."""
    asked: Asked = {}
    for other in item.session.items:
        if _is_law_test(other) and _key(other) == _key(item):
            asked.setdefault(other.cls, []).append(other.callspec.params["case"])
    return asked


def _is_law_test(item: Any) -> bool:
    """Return True for a test of a contract, not for one that a subclass has beside them."""
    tested = getattr(item, "cls", None)
    is_contract = tested is not None and issubclass(tested, Contract)
    return is_contract and item.originalname in LAW_TESTS


def _key(item: Any) -> tuple[object, ...]:
    """Return what tests have in common that are measured together."""
    marks = sorted(repr(mark) for mark in item.iter_markers() if mark.name != "parametrize")
    return (item.module, item.cls.measured_with(), marks, sorted(item.fixturenames))


def _by_case(
    tested: type[Any], cases: Iterable[str], findings: list[Finding] | DistcoreError
) -> Outcomes:
    """Return the outcomes of one class: an error is that of each case."""
    if isinstance(findings, DistcoreError):
        return {(tested, case): findings for case in cases}
    return {(tested, finding.case): finding for finding in findings}


def _in_turns(
    subjects: dict[type[Any], Subject],
) -> Iterator[tuple[type[Any], list[Finding] | DistcoreError]]:
    """Measure a few at a time: permanent memory of backends, such as large buffers,
    must not add up.
    """
    classes = [*subjects]
    for start in range(0, len(classes), PER_LAUNCH):
        group = classes[start : start + PER_LAUNCH]
        measured = STRATEGIES.measure_each([subjects[tested] for tested in group], group[0].limit)
        yield from zip(group, measured, strict=True)
