"""The parts of a measurement: cases, measured errors with bounds, and findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distcore.errors import DistcoreError, StrategyError
from distcore.hints import nearest
from distcore.launchers.processes.failures import one_line

LAWS = {
    "order": 1, "gradient": 2, "clipping": 3, "evaluation": 4,
    "checkpoint": 5, "resume": 7, "agreement": 8, "surprise": 9,
    "bits": 10,
}  # fmt: skip
"""Number of each law that a strategy can break, by name. Law 6, commit, is missing: only the
core can break it.
"""

SCALE = "gradients are "
"""Prefix of notes on a scale error of all gradients, which explains later failures."""
ALONE = "refused by one rank: "
"""Prefix of notes on a run that one rank refuses while others wait for it."""
EXACT = 0.0
"""No error at all."""
FP32 = 1e-5
"""Relative error of parameters, moments, gradient norms and losses after ten
AdamW steps in fp32.
"""
BF16 = 2e-2
"""The same in bf16, against a single process that computes in bf16, too."""
FORWARD = 1e-6
"""Absolute error of a row's outputs in fp32. It is not 0: in another batch a row may be
padded to another length.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurement of a case. The case holds if ``error <= bound``."""

    error: float
    """The measured error: a relative or absolute difference, a count or seconds; NaN is
    never within the bound.
    """
    bound: float
    """The largest error that is allowed."""
    note: str = ""
    """Where the error was seen, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a case for a strategy: one row of the table that ``distcore check`` prints."""

    law: str
    """Name of the law, a key of ``LAWS``."""
    case: str
    """Name of the case."""
    held: bool | None
    """True if the promise was kept; ``None`` if the case was skipped."""
    error: float | None = None
    """The measured error; ``None`` if the case was skipped or ended before it had one."""
    bound: float | None = None
    """The largest error that is allowed; ``None`` where ``error`` is."""
    note: str = ""
    """Place of the error, reason to skip, or exception; one line."""

    @property
    def verdict(self) -> str:
        """``held``, ``broken`` or ``skipped``."""
        return {True: "held", False: "broken", None: "skipped"}[self.held]

    def __str__(self) -> str:
        """Return the result in one line."""
        measured = ""
        if self.error is not None:
            measured = f": error {self.error:.2g}, bound {self.bound:.2g}"
        return (
            f"law {LAWS[self.law]}, {self.law}: {self.case} is {self.verdict}{measured};"
            f" {self.note}"
        )

    def excused(self, exempt: Mapping[str, str], strict: bool = True) -> Finding:
        """Return a broken finding as skipped if ``exempt`` has its case or its law, mapped to the
        reason.

        A case that is exempt but holds is broken, unless ``strict`` is false; an exempt law may
        have cases that hold.
        """
        reason_of_case = exempt.get(self.case)
        reason = reason_of_case or exempt.get(self.law)
        if self.held is False and reason:
            return replace(self, held=None, error=None, bound=None, note=reason)
        if self.held and reason_of_case and strict:
            note = (
                "declared exempt, but it holds; take it out of exempt (reason there:"
                f" {reason_of_case})"
            )
            return replace(self, held=False, error=None, bound=None, note=note)
        return self


Report = Callable[[Finding], object]
"""Called with each finding as its case ends."""


class Skip(Exception):
    """Raised by a case that cannot be measured with this strategy or number of ranks; the
    message is the reason.
    """


class RefusedAlone(Skip):
    """Raised by a case whose run this rank refuses while other ranks wait for it.

    In a run its line ends the others; in a measurement the ranks must be ended.
    """

    def __init__(self, line: str) -> None:
        super().__init__(f"{ALONE}{line}")


def needs(holds: bool, reason: str) -> None:
    """Raise Skip, with the reason, unless something holds that the case depends on."""
    if not holds:
        raise Skip(reason)


def none_of(wrong: Iterable[str], what: str, then: str = "") -> Measured:
    """Return a measurement that holds if there are no names in ``wrong``.

    ``what`` says what is named there, and ``then`` what to do about it: "rows that are missing",
    "yield each number once".
    """
    names = list(wrong)
    first_names = ", ".join(names[:3]) or "none"
    note = f"{what}: {first_names}"
    if names and then:
        note = f"{note}; {then}"
    return Measured(error=len(names), bound=EXACT, note=note)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement of a law."""

    law: str
    """Name of the law, a key of ``LAWS``."""
    name: str
    """Name of the case: that of its function, with ``-`` for ``_``."""
    title: str
    """The promise in one sentence: the first line of the function's docstring."""
    measure: Callable[[Any], Measured]
    """The function; it takes the laboratory of its suite, and may raise ``Skip``."""
    is_job: bool = False
    """True if it starts ranks of its own; it then takes a ``JobLab``, which is in no rank."""

    def measure_in(self, lab: Any) -> Finding:
        """Measure the case in ``lab`` and return its result, whatever is raised."""
        try:
            measured = self.measure(lab)
        except Skip as reason:
            return self.finding(None, str(reason))
        except DistcoreError as error:
            return self.finding(False, one_line(str(error)))
        except Exception as error:  # of the strategy or the task under test
            return self.finding(False, one_line(f"{type(error).__name__}: {error}"))
        # False for NaN, too: no comparison with it is true.
        held = measured.error <= measured.bound
        return self.finding(held, measured.note, measured.error, measured.bound)

    def finding(
        self, held: bool | None, note: str, error: float | None = None, bound: float | None = None
    ) -> Finding:
        """Return the result of the case; without ``error`` if it was skipped, or failed before it
        had one to report.
        """
        return Finding(law=self.law, case=self.name, held=held, error=error, bound=bound, note=note)


def merged(findings: list[Finding]) -> Finding:
    """Return the worst of one case's results on all ranks, which ``findings`` holds in rank order.

    Broken is worse than skipped, and skipped is worse than held. The note of a broken case
    begins with the rank.
    """
    if all(finding.held is None for finding in findings):
        return findings[0]
    worst_rank = max(range(len(findings)), key=lambda rank: _badness(findings[rank]))
    worst = findings[worst_rank]
    errors = [finding.error or 0.0 for finding in findings]
    # Ranks whose gradients are not summed train weights of their own, and each has another error.
    is_wrong_everywhere = min(errors) > 0
    is_other_by_rank = max(errors) > 1.01 * min(errors)
    if LAWS[worst.law] in (2, 3, 5, 7) and is_wrong_everywhere and is_other_by_rank:
        note = f"{SCALE}not the same on all ranks: are they summed, before they are clipped?"
        return replace(worst, note=note)
    if worst.held is False:
        return replace(worst, note=f"rank {worst_rank}: {worst.note}")
    return worst


def _badness(finding: Finding) -> tuple[bool, bool, float]:
    """Return a key to find the worst: broken, then NaN, then the larger error.

    A finding without an error has ended before it had one, which is worse than any number.
    """
    error = math.inf if finding.error is None else finding.error
    return finding.held is False, math.isnan(error), error


def needless(exempt: Mapping[str, str], findings: Sequence[Finding]) -> StrategyError | None:
    """Return an error if a name in ``exempt``, of a law or a case, excuses none of ``findings``,
    which are those of every case.

    ``None`` if a case is broken, which is to be seen first.
    """
    if any(finding.held is False for finding in findings):
        return None
    names_of_findings: set[str] = set()
    names_that_excuse: set[str] = set()
    for finding in findings:
        for name in (finding.case, finding.law):
            names_of_findings.add(name)
            # ``excused`` made the reason the note.
            if finding.note == exempt.get(name):
                names_that_excuse.add(name)
    needless_names = sorted(exempt.keys() - names_that_excuse)
    if not needless_names:
        return None
    first = needless_names[0]
    hint = "" if first in names_of_findings else nearest(first, names_of_findings)
    return StrategyError(
        f"exempt has {first!r}{hint}, but every case of it holds or does not apply; take it out"
    )
