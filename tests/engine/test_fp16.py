"""fp16 with its loss scaler: ranks without rows, steps that overflow, and resuming, against
one process in fp16.
"""

from __future__ import annotations

import json
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
        strategy=strategy,
        precision="fp16",
        out=str(out),
        device="cpu",
        lr=0.01,
        global_batch_size=BATCH,
        micro_batch_size=1,
        max_steps=STEPS,
        **changes,
    )
    scales = Scales(scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "distcore.engine.trainer.load_extensions",
            lambda c: load_extensions(c) | {"scales": scales},
        )
        train(config, Problem(rows=ROWS))
    return scales.seen


def largest_difference(one: Path, other: Path, step: int = STEPS) -> float:
    first, second = (Checkpoint(out / f"checkpoints/step-{step:08d}") for out in (one, other))
    names = [name for name in first if name.startswith("model/")]
    return max(difference(first[name], second[name]).relative for name in names)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_two_ranks_end_where_one_process_does(tmp_path: Path) -> None:
    alone = half("single", tmp_path / "single", 2.0**10)
    ranks = launch(half, "ddp", tmp_path / "ddp", 2.0**10, nproc=2)
    assert ranks[0] == ranks[1] == alone == [2.0**10] * STEPS, "no step overflows"
    assert largest_difference(tmp_path / "ddp", tmp_path / "single") < 0.02


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_ranks_skip_the_same_overflowing_steps(tmp_path: Path) -> None:
    ranks = launch(half, "ddp", tmp_path / "ddp", 2.0**18, nproc=2)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == 2.0**17, "the first step was to overflow"
    assert ranks[0][-1] == ranks[0][-2], "the last was not to"


def test_a_step_that_is_skipped_is_counted_and_said_and_nothing_else_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    averaged: list[int] = []
    monkeypatch.setattr(
        "distcore.engine.loop.averages.update", lambda run, hooks, step: averaged.append(step)
    )
    linear: dict[str, Any] = {
        "schedule": {"name": "linear"},
        "ema": {"decay": 0.5},
        "log_every": 1,
        "save_every": 5,
    }
    with caplog.at_level("WARNING", logger="distcore"):
        scales = half("single", tmp_path, 2.0**20, checkpoints={"keep_last": 3}, **linear)
    before = [2.0**20, *scales]
    skipped = [step for step in range(1, STEPS + 1) if before[step] < before[step - 1]]
    stepped = [step for step in range(1, STEPS + 1) if step not in skipped]
    assert 2 <= len(skipped) < STEPS - 2, "some steps were to overflow, and not all"
    assert averaged == stepped
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train/lr" in line]
    for line in logged:
        gone = sum(step <= line["step"] for step in stepped)
        assert line["train/lr"] == pytest.approx(0.01 * (1 - gone / STEPS))
        assert line["train/skipped_steps"] == line["step"] - gone
    assert json.loads((tmp_path / "report.json").read_text())["skipped_steps"] == len(skipped)
    said = [
        record.message
        for record in caplog.records
        if record.message.startswith("fp16: 1 of the last 1 steps")
    ]
    assert len(said) == len(skipped)
    half(
        "single",
        tmp_path / "again",
        0,
        resume=str(tmp_path / "checkpoints/step-00000005"),
        **linear,
    )
    again = (tmp_path / "again/metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("train/lr") for line in again]
    assert [rate for rate in rates if rate is not None] == [
        line["train/lr"] for line in logged if line["step"] > 5
    ]


@pytest.mark.programs
def test_a_resumed_run_goes_on_with_the_scale_bit_for_bit(tmp_path: Path) -> None:
    whole = half("single", tmp_path / "whole", 2.0**24, save_every=5, checkpoints={"keep_last": 3})
    again = half(
        "single", tmp_path / "again", 0, resume=str(tmp_path / "whole/checkpoints/step-00000005")
    )
    assert again == whole[5:]
    assert largest_difference(tmp_path / "again", tmp_path / "whole") == 0
