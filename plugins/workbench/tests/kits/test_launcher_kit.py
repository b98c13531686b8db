"""The kit of launchers: ours keep its laws, and each law is broken by a launcher that
breaks it on purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_cases import broken_in

from distcore import ConfigError, registry
from distcore_workbench.kits.launcher import SUITE

FILE = Path(__file__).with_name("broken_launchers.py")
BROKEN = broken_in(FILE)
WITH_RANKS = ("starts-ranks", "says-that-ranks-failed")
OURS = sorted(registry.offers("launchers"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.ranks] * (case in WITH_RANKS))
        for name, case in BROKEN.items()
    ],
)
def test_a_broken_launcher_breaks_its_law(name: str) -> None:
    (finding,) = SUITE.measure(f"{FILE}:{name}", only=[BROKEN[name]])
    assert finding.held is False, finding
    assert finding.note


@pytest.mark.parametrize("name", OURS)
def test_our_launchers_plan_by_the_laws(name: str) -> None:
    findings = SUITE.measure(name, only=SUITE.cases.keys() - set(WITH_RANKS))
    assert [str(finding) for finding in findings if not finding.held] == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", [f"{FILE}:Sound", *OURS])
def test_our_launchers_start_ranks(name: str) -> None:
    assert [
        str(finding) for finding in SUITE.measure(name, only=WITH_RANKS) if finding.held is False
    ] == []


def test_every_case_has_a_broken_launcher() -> None:
    assert set(BROKEN.values()) == set(SUITE.cases)


def test_a_request_has_its_own_fields() -> None:
    with pytest.raises(ConfigError, match=r"port: no field of a request to a launcher"):
        SUITE.measure("local", {"port": 1})
    with pytest.raises(ConfigError, match=r"--launcher kubernetes:pod"):
        SUITE.measure("kubernetes", {"value": "pod"})


def test_a_file_is_named_from_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILE.parent)
    (finding,) = SUITE.measure(f"{FILE.name}:Sound", only=["same-plan-again"])
    assert finding.held, finding
