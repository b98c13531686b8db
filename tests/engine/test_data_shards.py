"""Ranks that train on the same rows: one data shard of two ranks keeps every law, and what is wrong
with it is seen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from distcore import (
    Capabilities,
    RankInfo,
    Run,
    RunConfig,
    World,
    defaults,
    hookimpl,
    launch,
    load_config,
)
from distcore.errors import AgreementError, ConfigError
from distcore.resolve.world_size import data_shards
from distcore.testing import STRATEGIES
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject

DDPStrategy: Any = pytest.importorskip("distcore_ddp.strategy").DDPStrategy


class Pairs(DDPStrategy):
    """Two ranks per data shard, as tensor or pipeline parallelism has them; here both
    do the same work.
    """

    @property
    def capabilities(self) -> Capabilities:
        declared: Capabilities = super().capabilities
        return replace(declared, ranks_per_shard=2)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        world: World = super().setup(config, rank_info)
        return replace(
            world,
            shard=world.rank // 2,
            shards=world.size // 2,
            is_shard_leader=world.rank % 2 == 0,
        )

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Send half of what both ranks of a pair have, since the ranks add all."""
        return defaults.backward(run, loss / 2) * 2


class BothSpeak(Pairs):
    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        world: World = super().setup(config, rank_info)
        return replace(world, is_shard_leader=True)


class OtherRows(Pairs):
    @hookimpl
    def build_sampler(self, run: Run, plan: Any) -> Any:
        return lambda epoch, step: plan.split(epoch, step, run.world.rank, run.world.size)


def findings(strategy: type, *cases: str, nproc: int = 2) -> dict[str, Any]:
    known = STRATEGIES.required
    config = load_config(None, {"strategy": "ddp", "nproc": nproc})
    wanted = tuple(
        case for name, case in known.items() if (name in cases if cases else not case.is_job)
    )
    (of_subject,) = STRATEGIES.measure_all(
        [Subject(config=config, cases=wanted, make=lambda _config: strategy())]
    )
    return {finding.case: finding for finding in of_subject}


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_ranks_per_data_shard_keep_every_law(nproc: int) -> None:
    broken = [
        str(finding) for finding in findings(Pairs, nproc=nproc).values() if finding.held is False
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.ranks
def test_two_ranks_that_speak_for_one_shard_are_refused() -> None:
    assert (
        "(rank, shard, shards, is_shard_leader)"
        in findings(BothSpeak, "true-world")["true-world"].note
    )


def train_with_other_rows(folder: Path) -> str:
    config = load_config(None, {"strategy": "ddp", "nproc": 2, "device": "cpu"})
    subject = Subject(config=config, cases=(), make=lambda _config: OtherRows())
    with lab_of(subject, folder) as lab, pytest.raises(AgreementError) as refused:
        lab.job(Problem(), data_guard_steps=1).train(1)
    return str(refused.value)


@pytest.mark.ranks
def test_ranks_of_one_shard_that_train_on_different_rows_are_refused(tmp_path: Path) -> None:
    for said in launch(train_with_other_rows, tmp_path, nproc=2):
        assert "ranks [0, 1] are data shard 0 but have other rows" in said


@pytest.mark.parametrize(("ranks", "message"), [(3, "--nproc 3: .*; use --nproc 2 or --nproc 4")])
def test_ranks_that_make_no_whole_shard_are_refused(ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data_shards(RunConfig(), Capabilities(spec_version=3, ranks_per_shard=2), ranks)
