"""The kit of schedules: the core's keep its laws, and each law is broken by a schedule that breaks
it on purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_cases import broken_in

from distcore.testing import suite_of
from distcore_workbench.kits.schedule import SUITE

FILE = Path(__file__).with_name("broken_schedules.py")
BROKEN = broken_in(FILE)
IN_THIS_PROCESS = sorted(SUITE.cases.keys() - {"any-process"})


@pytest.mark.programs
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_breaks_its_law(name: str) -> None:
    (finding,) = SUITE.measure(f"{FILE}:{name}", only=[BROKEN[name]])
    assert finding.held is False, finding
    assert finding.note


def test_a_schedule_of_a_file_keeps_every_law() -> None:
    findings = SUITE.measure(f"{FILE}:sound")
    assert [str(finding) for finding in findings if not finding.held] == []


@pytest.mark.parametrize("name", ["linear", "polynomial", "inverse_sqrt", "warmup_stable_decay"])
def test_schedules_of_the_core_keep_the_laws(name: str) -> None:
    findings = SUITE.measure(name, only=IN_THIS_PROCESS)
    assert [str(finding) for finding in findings if not finding.held] == []


def test_the_suite_is_found_by_its_kind() -> None:
    assert suite_of("schedule") is SUITE


def test_every_case_has_a_broken_schedule() -> None:
    assert set(BROKEN.values()) == set(SUITE.cases)
