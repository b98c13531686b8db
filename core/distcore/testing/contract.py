"""The laws as pytest tests; the one module here that imports pytest.

A plugin's test is three lines::

    class TestMine(StrategyContract):
        strategy = "mine"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

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

    @pytest.fixture(scope="class")
    def findings(self, request: pytest.FixtureRequest) -> dict[str, Finding]:
        """What was measured, by case."""
        tested: type[StrategyContract] = request.cls
        found = check(tested.strategy, tested.nproc, tested.options, limit=tested.limit)
        return {finding.case: finding for finding in found}

    @pytest.mark.parametrize("case", all_cases())
    def test_law(self, case: str, findings: dict[str, Finding]) -> None:
        """A broken law fails with its error, its bound and where it was seen; a declared exemption skips."""
        finding = findings[case]
        if finding.held is None:
            pytest.skip(finding.note)
        assert finding.held, str(finding)
