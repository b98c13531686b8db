"""The kit of optimizers: ours keep its laws, and each law is broken by an optimizer that
breaks it on purpose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_cases import broken_in

from distcore import ConfigError, StrategyError, registry
from distcore.cli.main import main
from distcore_workbench.kits.optimizer import SUITE

FILE = Path(__file__).with_name("broken_optimizers.py")
WITH_RANKS = ("two-ranks",)
OURS = sorted(registry.offers("optimizers"))


BROKEN = broken_in(FILE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.ranks] * (case in WITH_RANKS))
        for name, case in BROKEN.items()
    ],
)
def test_a_broken_optimizer_breaks_its_law(name: str) -> None:
    (finding,) = SUITE.measure(f"{FILE}:{name}", only=[BROKEN[name]])
    assert finding.held is False, finding
    assert finding.note


@pytest.mark.ranks
def test_every_case_has_a_broken_optimizer_and_a_sound_one_keeps_all() -> None:
    assert set(BROKEN.values()) == set(SUITE.cases)
    assert [str(finding) for finding in SUITE.measure(f"{FILE}:Sound") if not finding.held] == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", OURS)
def test_our_optimizers_keep_the_laws(name: str) -> None:
    assert [str(finding) for finding in SUITE.measure(name) if finding.held is False] == []


def test_an_exemption_that_is_not_needed_is_an_error() -> None:
    (finding,) = SUITE.measure(f"{FILE}:NeedlesslyExempt", only=["goes-down"])
    assert (
        finding.note
        == "declared exempt, but it holds; take it out of exempt (reason there: for no reason)"
    )


def test_an_optimizer_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        StrategyError, match=r"no optimizer named 'lionn' \(installed: .*did you mean 'lion'"
    ):
        SUITE.measure("lionn")
    with pytest.raises(
        ConfigError,
        match=r"check --optimizer lion: --case: no case 'continue' \(did you mean 'conti",
    ):
        SUITE.measure("lion", only=["continue"])
    command = ["check", "--optimizer", "lion", "--case", "goes-down", "--set", "optimizer.betas=1"]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("error: optimizer 'lion': betas = ")


def test_the_command_prints_the_table_and_says_by_its_status_what_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--optimizer", "lion", "--case", "goes-down"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 held, 0 broken, 0 skipped"
    assert main(["check", "--optimizer", f"{FILE}:Uphill", "--case", "goes-down"]) == 1
    assert "broken: goes-down: " in capsys.readouterr().out
