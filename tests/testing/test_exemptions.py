"""Exempt cases are measured all the same: they must break, and an exemption without
need is an error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distcore import Run, StrategyError, hookimpl, load_config
from distcore.testing import STRATEGIES, TASKS, runner
from distcore.testing.findings import Finding, needless
from distcore.testing.subject import Subject

DDPStrategy: Any = pytest.importorskip("distcore_ddp.strategy").DDPStrategy
WHY = "as this test says"


class Exempt(DDPStrategy):
    """DDP with exemptions, and whatever else a subclass declares."""

    declares: Mapping[str, Any] = {}

    @property
    def capabilities(self) -> Any:
        return dataclasses.replace(super().capabilities, **self.declares)


class CountsTwice(Exempt):
    @hookimpl
    def reduce_loss(self, run: Run, values: Any) -> Any:
        return 2 * super().reduce_loss(run, values)


class NeverSteps(Exempt):
    @hookimpl
    def step(self, run: Run, clip: Any) -> Any:
        time.sleep(60)


def measured(
    strategy: type[Exempt], *cases: str, nproc: int = 2, limit: float = 60, **declares: Any
) -> list[Finding]:
    strategy = type("Declared", (strategy,), {"declares": declares})
    known, config = STRATEGIES.required, load_config(None, {"strategy": "ddp", "nproc": nproc})
    subject = Subject(
        config=config, cases=tuple(known[name] for name in cases), make=lambda _config: strategy()
    )
    (findings,) = STRATEGIES.measure_all([subject], limit)
    return findings


@pytest.mark.ranks
def test_an_exempt_case_is_measured_and_must_break() -> None:
    exempt = dict.fromkeys(("sum-over-ranks", "gather-unequal"), WHY)
    broken, held = measured(CountsTwice, *exempt, exempt=exempt)
    assert (broken.held, broken.note) == (None, WHY)
    assert held.held is False
    assert (
        held.note == f"declared exempt, but it holds; take it out of exempt (reason there: {WHY})"
    )


@pytest.mark.ranks
def test_a_case_of_an_exempt_law_that_holds_is_held() -> None:
    findings = measured(CountsTwice, "sum-over-ranks", "gather-unequal", exempt={"evaluation": WHY})
    assert [(finding.held, finding.error) for finding in findings] == [(None, None), (True, 0)]


@pytest.mark.ranks
def test_a_law_that_is_exempt_without_need_is_an_error_once_all_its_cases_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ("sum-over-ranks", "true-world")
    assert [finding.held for finding in measured(Exempt, *asked, exempt={"agreement": WHY})] == [
        True,
        True,
    ]
    required = {name: STRATEGIES.cases[name] for name in asked}
    monkeypatch.setattr(type(STRATEGIES), "required", required)
    with pytest.raises(
        StrategyError,
        match=r"^exempt has 'agreement', but every case of it holds or does not apply",
    ):
        measured(Exempt, *asked, exempt={"agreement": WHY})


@pytest.mark.ranks
@pytest.mark.parametrize("declares", [{"deterministic": False}, {"nproc": 1}])
def test_an_exempt_case_that_timing_or_the_number_of_ranks_decides_may_hold(
    declares: dict[str, Any],
) -> None:
    (finding,) = measured(Exempt, "sum-over-ranks", exempt={"sum-over-ranks": WHY}, **declares)
    assert finding.held is True


@pytest.mark.parametrize(
    ("case", "nproc", "must_break"),
    [
        ("bit-for-bit", 2, False),
        ("bit-for-bit", 3, True),
        ("mid-epoch", 2, True),
        ("mid-epoch", 1, False),
    ],
)
def test_a_case_that_only_the_order_of_a_sum_breaks_may_hold_on_two_ranks(
    case: str, nproc: int, must_break: bool
) -> None:
    config = load_config(None, {"strategy": "ddp", "nproc": nproc})
    assert Subject(config=config, cases=()).must_break(case) is must_break


@pytest.mark.ranks
def test_an_exempt_case_that_hangs_ends_at_the_limit_and_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "HANGS", 1)
    hung, after = measured(
        NeverSteps, "partitions", "true-world", limit=2, exempt={"partitions": WHY}
    )
    assert (hung.held, hung.note) == (None, WHY)
    assert after.held is True


def test_an_exemption_that_excuses_nothing_is_named() -> None:
    finding = partial(Finding, law="gradient")
    findings = [
        finding(case="bf16", held=True),
        finding(case="fp16", held=None, note="no fp16 here"),
    ]
    said = str(
        needless({"fp16": WHY, "bf16": WHY}, [finding(case="bf16", held=None, note=WHY), *findings])
    )
    assert said == "exempt has 'fp16', but every case of it holds or does not apply; take it out"
    assert "exempt has 'gradeint' (did you mean 'gradient'?), but" in str(
        needless({"gradeint": WHY}, findings)
    )
    assert needless({"gradient": WHY}, [finding(case="bf16", held=None, note=WHY)]) is None
    assert needless({"fp16": WHY}, [finding(case="bf16", held=False), *findings]) is None


TASK = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distcore import Simple

class Exempt(Simple):
    exempt = {"items-count": "without need"}

    def data(self):
        rows = TensorDataset(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)))
        return rows, rows

    def model(self):
        return nn.Linear(2, 1)

    def row_loss(self, model, batch):
        return model(batch[0]).float().square().squeeze(-1)

class NotApplicable(Exempt):
    exempt = {"own-steps-repeat": "it makes none"}

class Unrepeatable(Exempt):
    exempt = {"same-rows-again": "rows are drawn anew"}

    def data(self):
        rows = TensorDataset(torch.randn(8, 2))
        return rows, rows
"""


@pytest.mark.programs
def test_the_exemptions_of_a_task_are_as_strict(tmp_path: Path) -> None:
    file = tmp_path / "rows.py"
    file.write_text(TASK)
    (finding,) = TASKS.measure(f"{file}:Exempt", only=["items-count"])
    assert (
        finding.note
        == "declared exempt, but it holds; take it out of exempt (reason there: without need)"
    )
    (finding,) = TASKS.measure(f"{file}:Unrepeatable", only=["same-rows-again"])
    assert (finding.held, finding.note) == (None, "rows are drawn anew")
    with pytest.raises(StrategyError, match="exempt has 'own-steps-repeat'"):
        TASKS.measure(f"{file}:NotApplicable")
