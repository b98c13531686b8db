"""Several strategies in the same ranks: each joins a world of its own, and none loses
what the others found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distcore import RankInfo, Run, RunConfig, StrategyError, World, hookimpl, load_config
from distcore.testing import STRATEGIES
from distcore.testing.subject import Subject

DDPStrategy: Any = pytest.importorskip("distcore_ddp.strategy").DDPStrategy
pytestmark = pytest.mark.ranks


class CannotJoin(DDPStrategy):
    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        raise StrategyError("no way in")


class DiesOnOneRank(DDPStrategy):
    @hookimpl
    def reduce_loss(self, run: Run, values: Any) -> Any:
        if run.world.rank == 1:
            os._exit(7)
        return values


class TellsItsProcess(DDPStrategy):
    """Writes down in which process each rank measures it."""

    processes = Path()

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        with (TellsItsProcess.processes / f"rank-{rank_info.rank}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        world: World = super().setup(config, rank_info)
        return world


def subject(strategy: Any, *cases: str, nproc: int = 2) -> Subject:
    known, config = STRATEGIES.required, load_config(None, {"strategy": "ddp", "nproc": nproc})
    return Subject(
        config=config, cases=tuple(known[case] for case in cases), make=lambda _config: strategy()
    )


def test_strategies_follow_each_other_in_the_same_processes(tmp_path: Path) -> None:
    TellsItsProcess.processes = tmp_path
    measured = STRATEGIES.measure_all(
        [subject(TellsItsProcess, "true-world", "gather-unequal") for _ in range(3)]
    )
    assert [[finding.held for finding in findings] for findings in measured] == [[True, True]] * 3
    for rank in range(2):
        processes = (tmp_path / f"rank-{rank}").read_text().split()
        assert (len(processes), len(set(processes))) == (3, 1)


def test_a_strategy_that_cannot_join_costs_the_others_nothing() -> None:
    kept, failed, after = STRATEGIES.measure_each(
        [subject(s, "true-world") for s in (DDPStrategy, CannotJoin, DDPStrategy)]
    )
    assert isinstance(failed, StrategyError)
    assert "no way in" in str(failed)
    for findings in (kept, after):
        assert isinstance(findings, list)
        assert [finding.held for finding in findings] == [True]


def test_a_case_that_takes_the_ranks_down_is_broken_and_the_rest_is_measured_in_new_ranks() -> None:
    cases = ("sum-over-ranks", "gather-unequal")
    first, second, third = STRATEGIES.measure_all(
        [subject(s, *cases) for s in (DDPStrategy, DiesOnOneRank, DDPStrategy)]
    )
    assert [finding.held for finding in [*first, *second, *third]] == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    assert "rank 1 of 2 failed: exited with 7" in second[0].note


def test_each_strategy_is_measured_with_its_own_number_of_ranks() -> None:
    measured = STRATEGIES.measure_all(
        [subject(DDPStrategy, "true-world", nproc=nproc) for nproc in (2, 1, 2)]
    )
    assert [findings[0].note for findings in measured] == [
        "2 ranks answer",
        "1 ranks answer",
        "2 ranks answer",
    ]


CONTRACTS = """
import pytest
from distcore.testing import StrategyContract

class TestPlain(StrategyContract):
    strategy = "ddp"

class TestStatic(StrategyContract):
    strategy = "ddp"
    options = {"static_graph": True}

class TestUnknownOption(StrategyContract):
    strategy = "ddp"
    options = {"statik_graph": True}

@pytest.mark.skip(reason="not here")
class TestSkipped(StrategyContract):
    strategy = "ddp"
    options = {"compression": "bf16"}
"""
COUNTS = """
from distcore.testing import runner

def launch(*arguments, launch=runner.launch, **options):
    with open("launches", "a") as file:
        file.write(f"{len(arguments[1].subjects)} subjects, {len(arguments[1].todo)} cases\\n")
    return launch(*arguments, **options)

runner.launch = launch
"""


def test_the_contracts_of_a_module_start_ranks_once_for_the_cases_that_are_asked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_contracts.py").write_text(CONTRACTS)
    (tmp_path / "conftest.py").write_text(COUNTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "gather-unequal or true-world",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert "2 failed, 4 passed, 2 skipped" in done.stdout, done.stdout
    assert (
        "strategy 'ddp': unknown option 'statik_graph' (did you mean 'static_graph'?)"
        in done.stdout
    )
    assert (tmp_path / "launches").read_text() == "2 subjects, 4 cases\n"


class NeverLeaves(DDPStrategy):
    @hookimpl
    def teardown(self, world: World) -> None:
        raise StrategyError("no way out")


class NeverSteps(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Any) -> Any:
        time.sleep(60)


def test_an_error_at_the_end_loses_no_finding() -> None:
    told: list[str] = []
    with pytest.raises(StrategyError, match="no way out"):
        STRATEGIES.measure_all(
            [subject(NeverLeaves, "true-world", "sum-over-ranks")],
            report=lambda finding: told.append(finding.case),
        )
    assert told == ["true-world", "sum-over-ranks"]


def test_after_three_cases_that_hang_the_others_are_not_measured() -> None:
    steps = ("partitions", "ragged-tail", "weighted-items", "frozen-parameters", "mid-epoch")
    started = time.monotonic()
    (findings,) = STRATEGIES.measure_all([subject(NeverSteps, "true-world", *steps)], limit=3)
    assert [finding.held for finding in findings] == [True, False, False, False, None, None]
    assert all(
        "after 3 s rank 0, 1 is stuck in hook step()" in finding.note for finding in findings[1:4]
    )
    assert findings[-1].note == "not measured: 3 cases hung before"
    assert time.monotonic() - started < 60
