"""The training time of a process, and the speed that follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distcore import Progress, RunConfig, train
from distcore.engine import meter
from distcore.plugin.batching.sampling import training_plan
from distcore.testing.problem import Problem


def test_the_speed_counts_time_up_to_now_but_for_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    measured = meter.Meter(Progress(step=1, samples=10))
    assert measured.samples_per_second(Progress(step=1, samples=10)) == 0.0  # no time has passed
    now[0] += 4
    assert measured.samples_per_second(Progress(step=2, samples=18)) == 2.0
    with measured.pause():
        now[0] += 50
    now[0] += 4
    assert measured.samples_per_second(Progress(step=3, samples=26)) == 2.0
    assert measured.seconds == 8.0


def logged(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def test_the_loss_of_a_line_is_the_mean_over_items_also_over_a_resume(tmp_path: Path) -> None:
    task = Problem(rows=10, weighted=True)

    def run(name: str, **changes: Any) -> list[tuple[int, float]]:
        config: dict[str, Any] = {
            "out": str(tmp_path / name),
            "lr": 1e-2,
            "max_steps": 8,
            "global_batch_size": 1,
            "device": "cpu",
            "save_every": 3,
            "checkpoints": {"keep_last": 9},
            "extensions": {"progress": False},
            "eval_at_epoch_end": False,
        }
        train(RunConfig(**config | changes), task)
        return logged(tmp_path / name)

    by_step = run("each", log_every=1)
    plan = training_plan(RunConfig(global_batch_size=1), task.prepare(RunConfig()).train)
    items = [
        int(task.prepare(RunConfig()).train.items[plan.rows(0, step)].sum()) for step in range(8)
    ]
    assert len(set(items)) > 1
    losses = [loss for _, loss in by_step]
    sums = [
        sum(a * b for a, b in zip(losses[at : at + 4], items[at : at + 4], strict=True))
        for at in (0, 4)
    ]
    means = [(4, sums[0] / sum(items[:4])), (8, sums[1] / sum(items[4:]))]
    whole = run("whole", log_every=4)
    assert [step for step, _ in whole] == [4, 8]
    assert [loss for _, loss in whole] == pytest.approx([loss for _, loss in means], rel=1e-6)
    for step in (3, 6):  # one before the first line, one before the second
        resumed = run(
            f"from-{step}", log_every=4, resume=str(tmp_path / f"whole/checkpoints/step-{step:08d}")
        )
        assert resumed[-1] == pytest.approx(whole[-1])
        assert len(resumed) == len(whole) - step // 4
        assert resumed[0] == pytest.approx(whole[step // 4])
