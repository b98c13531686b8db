"""The kit of readers: ours keeps its laws, and each law is broken by a reader that
breaks it on purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_cases import broken_in

from distcore_workbench.kits.reader import SUITE

FILE = Path(__file__).with_name("broken_readers.py")
BROKEN = broken_in(FILE)


@pytest.mark.programs
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reader_breaks_its_law(name: str) -> None:
    (finding,) = SUITE.measure(f"{FILE}:{name}", only=[BROKEN[name]])
    assert finding.held is False, finding
    assert finding.note


@pytest.mark.programs
@pytest.mark.parametrize("name", ["files", f"{FILE}:Sound"])
def test_our_reader_keeps_the_laws(name: str) -> None:
    assert [str(finding) for finding in SUITE.measure(name) if not finding.held] == []


def test_every_case_has_a_broken_reader() -> None:
    assert set(BROKEN.values()) == set(SUITE.cases)
