"""The laws from a task's side as pytest tests: a task's test subclasses ``TaskContract``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import pytest

from distcore.testing.findings import Finding
from distcore.testing.register import task_cases
from distcore.testing.runner import check_task


class TaskContract:
    """One test per case. The first test measures all cases of its class."""

    task: ClassVar[str]
    """Name of an installed task, or ``file.py:Class``."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Config keys by dotted name, such as ``{"task_options.model": "small"}``."""

    @pytest.mark.parametrize("case", task_cases())
    def test_law(self, case: str) -> None:
        """A broken law fails with its error, its bound and where it was seen; a declared exemption skips."""
        outcome = _measure(self.task, *sorted(self.settings.items()))[case]
        if outcome.held is None:
            pytest.skip(outcome.note)
        if not outcome.held:
            pytest.fail(str(outcome), pytrace=False)


@cache
def _measure(task: str, *settings: tuple[str, Any]) -> dict[str, Finding]:
    return {finding.case: finding for finding in check_task(task, dict(settings))}
