"""The laws as pytest tests; the one module here that imports pytest.

A plugin's test is three lines::

    class TestMine(StrategyContract):
        strategy = "mine"
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import pytest

from distcore.errors import DistcoreError
from distcore.testing.cases import Finding, all_cases
from distcore.testing.runner import LIMIT, check


class StrategyContract:
    """One test a case, all measured by a single launch of the ranks when the first of them runs."""

    strategy: ClassVar[str]
    """Name of an installed strategy."""
    options: ClassVar[Mapping[str, Any]] = {}
    """The strategy's options."""
    nproc: ClassVar[int] = 2
    """Ranks; a strategy that declares one process gets one."""
    limit: ClassVar[float] = LIMIT
    """Seconds that one case may take before the ranks are ended and the stuck one is named."""

    @pytest.mark.parametrize("case", all_cases())
    def test_law(self, case: str) -> None:
        """A broken law fails with its error, its bound and where it was seen; a declared exemption skips."""
        tested: Any = type(self)
        findings = _findings(tested)
        if isinstance(findings, DistcoreError):
            raise findings
        finding = findings[case]
        if finding.held is None:
            pytest.skip(finding.note)
        assert finding.held, str(finding)


@cache
def _findings(tested: type[Any]) -> dict[str, Finding] | DistcoreError:
    """What was measured, by case; an error is kept, too, so that no second test starts the ranks again."""
    try:
        found = check(tested.strategy, tested.nproc, tested.options, limit=tested.limit)
    except DistcoreError as error:
        return error
    return {finding.case: finding for finding in found}
