"""A suite measures the laws of any kind of plugin: which cases, from which random state, and what
of them is excused.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from work_folder import install

from distcore import ConfigError, StrategyError
from distcore.cli.main import main
from distcore.deprecation import DeprecatedWarning
from distcore.testing import STRATEGIES, TASKS, Finding, Measured, Suite, kinds, needs, suite_of

ROOT = Path(__file__).parents[2]
WHY = "as this test says"


@dataclass
class Lab:
    """A plugin that is nothing but its exemptions, and what cases have noted."""

    exempt: Mapping[str, str]
    folder: Path
    drawn: list[float] = field(default_factory=list)


def suite_with(exempt: Mapping[str, str] | None = None, **facts: Any) -> Suite:
    """Return a suite of a case that holds, one that breaks and one that is skipped."""

    def make_lab(name: str, settings: Mapping[str, Any], folder: Path) -> Lab:
        return Lab(exempt or {}, folder)

    suite = Suite("sampler", make_lab, **facts)

    @suite.law("surprise")
    def draws_alike(lab: Lab) -> Measured:
        """Numbers are those
        of the seed.

        They are noted, too.
        """
        lab.drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return Measured(error=0, bound=0, note=repr(lab.drawn))

    @suite.law("order")
    def every_row(lab: Lab) -> Measured:
        """Every row comes."""
        return Measured(error=2, bound=1, note=f"{len(list(lab.folder.iterdir()))} files")

    @suite.law("order")
    def in_two_parts(lab: Lab) -> Measured:
        """Rows come in two parts."""
        needs(False, "there is one part")
        raise AssertionError("the case was skipped")

    return suite


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.case: finding.verdict for finding in findings}


def test_a_case_has_the_name_and_the_title_of_its_function() -> None:
    cases = suite_with().cases
    assert list(cases) == ["draws-alike", "every-row", "in-two-parts"]
    assert cases["draws-alike"].law == "surprise"
    assert cases["draws-alike"].title == "Numbers are those of the seed."


def test_the_cases_of_several_modules_stand_in_the_order_of_the_laws() -> None:
    for suite, last in ((STRATEGIES.required, "bits"), (TASKS.cases, "surprise")):
        laws = list(dict.fromkeys(case.law for case in suite.values()))
        assert laws[0] == "order"
        assert laws[-1] == last


def test_each_case_is_measured_in_an_empty_folder_and_reported_as_it_ends() -> None:
    reported: list[Finding] = []
    findings = suite_with().measure("mine", report=reported.append)
    assert findings == reported
    assert [finding.verdict for finding in findings] == ["held", "broken", "skipped"]
    assert [finding.note for finding in findings[1:]] == ["0 files", "there is one part"]


def test_a_case_measures_alone_what_it_measures_among_others_and_leaves_no_trace() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    (alone,) = suite_with().measure("mine", only=["draws-alike"])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    among, *_ = suite_with().measure("mine")
    assert alone.note == among.note


def test_what_is_exempt_is_excused_by_case_or_by_law() -> None:
    for exempt in ({"every-row": WHY}, {"order": WHY}):
        findings = suite_with(exempt).measure("mine")
        assert verdicts(findings)["every-row"] == "skipped"
        assert findings[1].note == WHY


def test_an_exemption_of_a_case_that_holds_is_broken() -> None:
    first, *_ = suite_with({"draws-alike": WHY}).measure("mine")
    assert first.held is False
    assert first.note.startswith("declared exempt, but it holds")


def test_an_exemption_of_nothing_is_one_line_before_anything_is_measured() -> None:
    reported: list[Finding] = []
    with pytest.raises(ConfigError, match=r"^sampler 'mine': exempt: no case 'every-roww' \(did"):
        suite_with({"every-roww": WHY}).measure("mine", report=reported.append)
    assert reported == []


@pytest.mark.parametrize("skips_by_plugin", [True, False])
def test_a_skipped_case_may_be_exempt_where_it_is_not_skipped_elsewhere(
    skips_by_plugin: bool,
) -> None:
    exempt = {"in-two-parts": WHY, "every-row": WHY}
    suite = suite_with(exempt, skips_by_plugin=skips_by_plugin)
    assert verdicts(suite.measure("mine", only=exempt)) == dict.fromkeys(exempt, "skipped")
    if skips_by_plugin:
        with pytest.raises(StrategyError, match="exempt has 'in-two-parts', but every case of it"):
            suite.measure("mine")
    else:
        suite.measure("mine")


def test_a_case_that_does_not_exist_is_one_line_for_each_kind() -> None:
    for kind in ("strategy", "task"):
        line = rf"^check --{kind} mine: --case: no case 'ordr'"
        with pytest.raises(ConfigError, match=line):
            suite_of(kind).measure("mine", only=["ordr"])


SAMPLERS = """
from distcore.testing import Measured, Suite

class Lab:
    exempt = {}

def make_lab(name, settings, folder):
    return Lab()

SUITE = Suite("sampler", make_lab)

@SUITE.law("order")
def every_row(lab):
    "Every row comes."
    return Measured(error=0, bound=0, note="all came")
"""


@pytest.fixture
def samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    """Installs a suite of samplers in an entry-point group; returns the group."""
    group: str = request.param
    install(tmp_path, "distcore-samplers", f"[{group}]\nsampler = {group[9:]}_samplers:SUITE\n")
    (tmp_path / f"{group[9:]}_samplers.py").write_text(SAMPLERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return group


@pytest.mark.parametrize("samplers", ["distcore.suites", "distcore.kits"], indirect=True)
@pytest.mark.filterwarnings("ignore::distcore.deprecation.DeprecatedWarning")
def test_a_suite_of_a_distribution_adds_a_kind(
    samplers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kinds()[:2] == ["strategy", "task"]
    assert kinds().count("sampler") == 1
    assert main(["check", "--sampler", "mine"]) == 0
    assert "every-row" in capsys.readouterr().out


@pytest.mark.parametrize("samplers", ["distcore.kits"], indirect=True)
def test_the_old_name_of_the_group_is_said(samplers: str) -> None:
    with pytest.warns(DeprecatedWarning, match="'distcore.kits', of 'sampler', is deprecated"):
        suite_of("sampler")


def test_the_suite_on_the_page_measures_samplers() -> None:
    page = (ROOT / "docs/laws.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Laws for another kind of plugin")
    _, _, block = section.partition("```python\n")
    names: dict[str, Any] = {"__name__": "page"}
    exec(block.partition("```")[0], names)
    (held,), (broken,) = (names["SUITE"].measure(f"builtins:{name}") for name in ("range", "bytes"))
    assert held.held is True
    assert broken.note.startswith("rows that are missing or repeated: 0, 1, 2; yield")
