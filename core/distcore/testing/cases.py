"""What a law's case is, what it finds, and how exact each law is.

A case is a function that measures one promise and returns an error with its bound. Most run inside the ranks, on a
world that is already set up; those that end or start processes of their own run in the process that started them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore.testing.lab import JobLab, Lab

LAWS = {
    "order": 1,
    "gradient": 2,
    "clipping": 3,
    "evaluation": 4,
    "checkpoint": 5,
    "resume": 7,
    "agreement": 8,
    "surprise": 9,
}
"""Names of the laws that a strategy can break, with their numbers; law 6, commit, is kept by the core alone."""

EXACT = 0.0
FP32 = 1e-5
"""Relative error of parameters, moments, gradient norms and losses after ten AdamW steps in fp32."""
BF16 = 2e-2
"""The same against one process that computes in bf16."""
FORWARD = 1e-6
"""Absolute error of a row's outputs in fp32: a row may be padded to another length in another batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a case measured: it holds if ``error <= bound``."""

    error: float
    bound: float
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the table. ``held`` is ``None`` where the case was skipped, and ``note`` says why."""

    law: str
    case: str
    held: bool | None
    error: float | None = None
    bound: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """``held``, ``broken`` or ``skipped``."""
        return {True: "held", False: "broken", None: "skipped"}[self.held]

    def __str__(self) -> str:
        measured = "" if self.error is None else f": error {self.error:.2g}, bound {self.bound:.2g}"
        return f"law {LAWS[self.law]}, {self.law}: {self.case} is {self.verdict}{measured}; {self.note}"


class Skip(Exception):
    """Raised by a case that has nothing to measure here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """A named measurement of one law; ``title`` says what it compares."""

    law: str
    name: str
    title: str
    measure: Callable[[Any], Measured]

    def skipped(self, reason: str) -> Finding:
        return Finding(law=self.law, case=self.name, held=None, note=reason)

    def broken(self, reason: str) -> Finding:
        return Finding(law=self.law, case=self.name, held=False, note=reason)

    def found(self, measured: Measured) -> Finding:
        """NaN is broken: it compares false with everything."""
        return Finding(
            law=self.law,
            case=self.name,
            held=measured.error <= measured.bound,
            error=measured.error,
            bound=measured.bound,
            note=measured.note,
        )


RANK_CASES: dict[str, Case] = {}
JOB_CASES: dict[str, Case] = {}
MODULES = ("order", "gradient", "clipping", "evaluation", "checkpoint", "resume", "agreement", "surprise")


def law(name: str) -> Callable[[Callable[[Lab], Measured]], Callable[[Lab], Measured]]:
    """Register a function of ``Lab`` as a case of law ``name``; the case is called as the function is."""
    return lambda function: _register(RANK_CASES, name, function)


def job_law(name: str) -> Callable[[Callable[[JobLab], Measured]], Callable[[JobLab], Measured]]:
    """Register a function of ``JobLab``, which starts processes of its own, as a case of law ``name``."""
    return lambda function: _register(JOB_CASES, name, function)


def _register(cases: dict[str, Case], name: str, function: Callable[..., Measured]) -> Callable[..., Measured]:
    case = function.__name__.replace("_", "-")
    cases[case] = Case(name, case, (function.__doc__ or "").strip().partition("\n")[0], function)
    return function


def all_cases() -> Mapping[str, Case]:
    """Every case by name, in the order of the laws."""
    for module in MODULES:
        import_module(f"distcore.testing.laws.{module}")
    cases = RANK_CASES | JOB_CASES
    return dict(sorted(cases.items(), key=lambda item: LAWS[item[1].law]))


def merged(findings: list[Finding]) -> Finding:
    """What several ranks found of one case: the worst of it, and which rank says so."""
    if all(finding.held is None for finding in findings):
        return findings[0]
    worst = max(range(len(findings)), key=lambda rank: _badness(findings[rank]))
    finding = findings[worst]
    return replace(finding, note=f"rank {worst}: {finding.note}") if finding.held is False else finding


def _badness(finding: Finding) -> tuple[bool, bool, float]:
    error = finding.error if finding.error is not None else float("inf")
    return finding.held is False, error != error, error
