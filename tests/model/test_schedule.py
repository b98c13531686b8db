"""The learning rate over a run, by the schedule's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from distcore import ConfigError, RunConfig, registry
from distcore.checkpoint.job_state import set_schedule_step
from distcore.model.optim import check_schedule, optimizer_factory, scheduler_for
from distcore.model.schedules import SCHEDULES
from distcore.testing.problem import Classifier


def rates(steps: int, **schedule: object) -> list[float]:
    """The learning rate of each step, for a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = scheduler_for(RunConfig(schedule=schedule, lr=1.0), optimizer, steps)
    assert scheduler is not None
    values = []
    for _ in range(steps):
        values.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
    return [*values, round(optimizer.param_groups[0]["lr"], 4)]


def test_warmup_stable_decay_rises_holds_and_falls_in_the_last_part() -> None:
    by_step = rates(12, name="warmup_stable_decay", warmup_steps=2, decay_ratio=1 / 3)
    assert by_step[:3] == [0.0, 0.5, 1.0]
    assert by_step[2:9] == [1.0] * 7
    assert 1 > by_step[9] > by_step[10] > by_step[11] > by_step[12] == 0


def test_a_rate_that_changes_by_epoch_is_that_of_the_first_step_of_each() -> None:
    """As in a loop that steps a schedule of epochs once in each: factor (total - epoch) / total."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    config = RunConfig(schedule={"interval": "epoch"}, lr=1.0)
    scheduler = scheduler_for(config, optimizer, 12, epoch=4)
    assert isinstance(scheduler, LambdaLR)
    theirs = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), lambda epoch: (3 - epoch) / 3
    )
    for epoch in range(3):
        for step in range(4):
            assert set_schedule_step(scheduler, 4 * epoch + step) == theirs.get_last_lr()
        theirs.optimizer.step()
        theirs.step()


def test_warmup_and_decay_that_exceed_the_run_leave_no_stable_part() -> None:
    by_step = rates(10, name="warmup_stable_decay", warmup_steps=4, decay_ratio=1.0)
    assert by_step[4] == 1 > by_step[5] > by_step[9] > by_step[10] == 0


def test_the_schedules_by_name() -> None:
    assert sorted(SCHEDULES) == [
        "constant",
        "constant_with_warmup",
        "cosine",
        "cosine_with_restarts",
        "inverse_sqrt",
        "linear",
        "polynomial",
        "warmup_stable_decay",
    ]


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"constant"}))
def test_each_schedule_rises_to_its_peak_and_resumes_at_any_step(name: str) -> None:
    config = RunConfig(schedule={"name": name, "warmup_steps": 3}, lr=1.0)
    check_schedule(config)
    by_step = rates(12, name=name, warmup_steps=3)
    assert by_step[:4] == [0.0, 0.3333, 0.6667, 1.0]
    assert max(by_step) == 1
    for step, rate in enumerate(by_step):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = scheduler_for(config, optimizer, 12)
        assert isinstance(scheduler, LambdaLR)  # what a resume sets to its step
        assert [round(there, 4) for there in set_schedule_step(scheduler, step)] == [rate]


@pytest.mark.parametrize("warmup", [{"warmup_steps": 2}, {"warmup_ratio": 0.1}])
def test_a_constant_rate_with_a_warmup_is_refused_with_the_schedule_that_has_one(
    warmup: dict[str, float],
) -> None:
    with pytest.raises(
        ConfigError, match=r"^schedule.name = 'constant': has no warm-up; use constant_with_warmup$"
    ):
        check_schedule(RunConfig(schedule={"name": "constant"} | warmup))


def test_a_rate_below_the_end_of_the_polynomial_is_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^lr = 1e-08: the schedule 'polynomial' ends at 1e-07; use a larger one$",
    ):
        check_schedule(RunConfig(schedule={"name": "polynomial"}, lr=1e-8))


def test_a_schedule_that_needs_more_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"^schedule.name = 'reduce_lr_on_plateau': no such .*warmup_stable_decay"
    ):
        check_schedule(RunConfig(schedule={"name": "reduce_lr_on_plateau"}))


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"constant"}))
@pytest.mark.parametrize(
    ("warmup", "total", "decay"),
    [(0, 1, 1), (0, 7, 3), (3, 12, 9), (5, 100, 20), (10, 10, 0), (117, 1001, 334)],
)
def test_each_schedule_is_that_of_transformers_to_the_last_bit(
    name: str, warmup: int, total: int, decay: int
) -> None:
    optimization = pytest.importorskip("transformers.optimization")

    def optimizer() -> torch.optim.Optimizer:
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (3e-4, 0.7)]
        return torch.optim.SGD(groups, lr=3e-4)

    more = {"num_decay_steps": decay} if name == "warmup_stable_decay" else {}
    ours, theirs = optimizer(), optimizer()
    settings = {"name": name, "warmup_steps": warmup}
    if decay:
        settings["decay_ratio"] = decay / total
    mine = scheduler_for(RunConfig(schedule=settings, lr=3e-4), ours, total)
    assert isinstance(mine, LambdaLR)
    other = optimization.get_scheduler(name, theirs, warmup, total, scheduler_specific_kwargs=more)
    for _ in range(total + 2 if name != "polynomial" or warmup < total else warmup - 1):
        assert [group["lr"] for group in ours.param_groups] == [
            group["lr"] for group in theirs.param_groups
        ]
        for each in (ours, theirs, mine, other):
            each.step()
    assert mine.state_dict() == other.state_dict()
    mine.load_state_dict(other.state_dict())
    assert mine.get_last_lr() == other.get_last_lr()


SIGN_DESCENT = """
import torch


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        # As Lion: no rate among the defaults.
        super().__init__(params, {"weight_decay": weight_decay})


def sgd(params, lr):
    return torch.optim.SGD(params, lr=0.3)  # the groups have rates, so this one is nobody's
"""
OWN = ("own.py:SignSGD", "own.py:sgd")


@pytest.mark.parametrize("lr", [5e-5, 1e-2])
@pytest.mark.parametrize("optimizer", [*sorted(registry.offers("optimizers")), *OWN])
def test_every_schedule_of_every_optimizer_follows_the_rate_of_the_run_as_in_transformers(
    optimizer: str, lr: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads the rate that its Trainer gives the optimizer, whatever
    rates the groups have.
    """
    optimization = pytest.importorskip("transformers.optimization")
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(SIGN_DESCENT)
    groups = [{"match": "head", "lr": 0.7}, {"match": r"blocks\.1", "lr_scale": 0.5}]
    settings = {"name": optimizer, "groups": groups}
    for name in sorted({*SCHEDULES} - {"constant"}):
        config = RunConfig(
            lr=lr,
            optimizer=settings,
            schedule={"name": name, "warmup_steps": 2, "decay_ratio": 0.5},
        )
        made = optimizer_factory(config)(Classifier())
        alike = [
            {"params": [torch.zeros(1, requires_grad=True)], "lr": group["lr"]}
            for group in made.param_groups
        ]
        scheduler = scheduler_for(config, made, 8)
        assert isinstance(scheduler, LambdaLR)
        theirs = torch.optim.SGD(alike, lr=lr)
        more = {"num_decay_steps": 4} if name == "warmup_stable_decay" else {}
        other = optimization.get_scheduler(name, theirs, 2, 8, scheduler_specific_kwargs=more)
        for step in range(9):
            assert set_schedule_step(scheduler, step) == [
                group["lr"] for group in theirs.param_groups
            ], name
            theirs.step()
            other.step()


def test_a_warm_up_as_long_as_the_run_ends_at_the_peak() -> None:
    assert rates(4, name="polynomial", warmup_steps=4)[-1] == 1
