"""fp16 with its loss scaler: ranks without rows, steps that overflow, and resuming, against one process in fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distcore import RunConfig, hookimpl, launch, train
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.distance import difference
from distcore.engine.trainer import load_extensions
from distcore.plugin.strategy.contract import Progress, Run
from distcore.testing.problem import Problem

ROWS, BATCH, STEPS = 9, 4, 9  # the third batch of an epoch is one row: a rank has none


class Scales:
    """Starts from a given loss scale, and writes down what becomes of it."""

    def __init__(self, first: float) -> None:
        self.first = first
        self.seen: list[float] = []

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.scaler is not None and run.config.resume is None:
            run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": self.first})

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress) -> None:
        assert run.scaler is not None
        self.seen.append(run.scaler.get_scale())


def half(strategy: str, out: Path, scale: float, **changes: Any) -> list[float]:
    config = RunConfig(
        strategy=strategy, precision="fp16", out=str(out), device="cpu", lr=0.01, global_batch_size=BATCH,
        micro_batch_size=1, max_steps=STEPS, **changes,
    )  # fmt: skip
    scales = Scales(scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distcore.engine.trainer.load_extensions", lambda c: load_extensions(c) | {"scales": scales})
        train(config, Problem(rows=ROWS))
    return scales.seen


def apart(one: Path, other: Path, step: int = STEPS) -> float:
    first, second = (Checkpoint(out / f"checkpoints/step-{step:08d}") for out in (one, other))
    names = [name for name in first if name.startswith("model/")]
    return max(difference(first[name], second[name]).relative for name in names)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_two_ranks_end_where_one_process_does(tmp_path: Path) -> None:
    alone = half("single", tmp_path / "single", 2.0**10)
    ranks = launch(half, "ddp", tmp_path / "ddp", 2.0**10, nproc=2)
    assert ranks[0] == ranks[1] == alone == [2.0**10] * STEPS, "no step overflows"
    assert apart(tmp_path / "ddp", tmp_path / "single") < 0.02


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_ranks_skip_the_same_overflowing_steps(tmp_path: Path) -> None:
    ranks = launch(half, "ddp", tmp_path / "ddp", 2.0**18, nproc=2)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == 2.0**17, "the first step was to overflow"
    assert ranks[0][-1] == ranks[0][-2], "the last was not to"


@pytest.mark.programs
def test_a_resumed_run_goes_on_with_the_scale_bit_for_bit(tmp_path: Path) -> None:
    whole = half("single", tmp_path / "whole", 2.0**24, save_every=5, checkpoints={"keep_last": 3})
    again = half("single", tmp_path / "again", 0, resume=str(tmp_path / "whole/checkpoints/step-00000005"))
    assert again == whole[5:]
    assert apart(tmp_path / "again", tmp_path / "whole") == 0
