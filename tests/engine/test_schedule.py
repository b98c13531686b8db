"""The learning rate over a run, by the schedule's name."""

from __future__ import annotations

import pytest
import torch

from distcore import ConfigError, RunConfig
from distcore.engine.optim import check_schedule, scheduler_for


def rates(steps: int, **schedule: object) -> list[float]:
    """The learning rate of each step, for a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = scheduler_for(RunConfig(schedule=schedule), optimizer, steps)
    assert scheduler is not None
    found = []
    for _ in range(steps):
        found.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
    return [*found, round(optimizer.param_groups[0]["lr"], 4)]


def test_warmup_stable_decay_rises_holds_and_falls_in_the_last_part() -> None:
    found = rates(12, name="warmup_stable_decay", warmup_steps=2, decay_ratio=1 / 3)
    assert found[:3] == [0.0, 0.5, 1.0]
    assert found[2:9] == [1.0] * 7
    assert 1 > found[9] > found[10] > found[11] > found[12] == 0


def test_warmup_and_decay_that_exceed_the_run_leave_no_stable_part() -> None:
    found = rates(10, name="warmup_stable_decay", warmup_steps=4, decay_ratio=1.0)
    assert found[4] == 1 > found[5] > found[9] > found[10] == 0


@pytest.mark.parametrize("name", ["warmup_stable_decay", "cosine", "linear", "constant"])
def test_schedules_without_arguments_of_their_own_are_taken(name: str) -> None:
    check_schedule(RunConfig(schedule={"name": name}))


def test_a_schedule_that_needs_more_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"^schedule.name = 'reduce_lr_on_plateau': no such .*warmup_stable_decay"):
        check_schedule(RunConfig(schedule={"name": "reduce_lr_on_plateau"}))
