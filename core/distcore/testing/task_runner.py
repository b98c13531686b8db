"""Measure the laws from the side of a task, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distcore.errors import StrategyError, nearest
from distcore.testing.cases import task_cases
from distcore.testing.findings import Case, Finding
from distcore.testing.task_lab import TaskLab, task_lab


def check_task(name: str, settings: Mapping[str, Any] | None = None, only: Iterable[str] = ()) -> list[Finding]:
    """Measure the laws of a task in this process; one finding per case, in the order of the laws.

    ``name``: an installed task, or ``file.py:Class``. ``settings``: config keys by dotted name, such as
    ``task_options.model``. ``only`` names some of the cases. Raises DistcoreError for a task that cannot be built or
    prepared.
    """
    cases, wanted = task_cases(), set(only)
    for unknown in wanted - cases.keys():
        raise StrategyError(f"no case named {unknown!r}{nearest(unknown, cases)} (cases: {', '.join(cases)})")
    with tempfile.TemporaryDirectory(prefix="distcore-check-") as folder:
        lab = task_lab(name, settings or {}, Path(folder))
        exempt: Mapping[str, str] = lab.task.exempt
        return [_finding(case, lab, exempt) for case in cases.values() if not wanted or case.name in wanted]


def _finding(case: Case, lab: TaskLab, exempt: Mapping[str, str]) -> Finding:
    return case.skipped(exempt[case.name]) if case.name in exempt else case.measured_in(lab)
