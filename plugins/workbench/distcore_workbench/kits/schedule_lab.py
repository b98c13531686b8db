"""The laboratory of a schedule's cases: learning rates of runs of any length, and a small job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from distcore import RunConfig, Session, load_config
from distcore.model import load_schedule, schedule_class, scheduler_for
from distcore_workbench.kits.session_runs import step_until

PEAK = 1e-2
"""The rate of the run, and of the first group."""
STEPS, EPOCH, BATCH = 12, 4, 8
"""Optimizer steps of the small job and of each of its epochs, and rows of a step."""


@dataclass
class ScheduleLab:
    """The schedule, by the config of a small run."""

    settings: Mapping[str, Any]
    """The config for one process, by dotted key; names the schedule and its options."""
    folder: Path
    """For run folders."""

    @property
    def name(self) -> str:
        """The schedule's name, or ``file.py:function``."""
        return self.config().schedule.name

    @property
    def options(self) -> type[Any]:
        """A dataclass with the schedule's options."""
        return schedule_class(self.name)

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases that the schedule declares not to keep, with reasons, in an attribute of its
        function.
        """
        declared: Mapping[str, str] = getattr(load_schedule(self.name), "exempt", {})
        return declared

    def config(self, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the config with changes by dotted key."""
        return load_config(None, {**self.settings, **(changes or {})})

    def scheduler(
        self,
        steps: int,
        changes: Mapping[str, Any] | None = None,
        peaks: Sequence[float] = (PEAK,),
    ) -> LambdaLR:
        """Return the schedule of a new run of so many steps, with a group at each of ``peaks``."""
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": peak} for peak in peaks]
        optimizer = torch.optim.SGD(groups, lr=PEAK)
        epoch = min(EPOCH, steps)
        scheduler = scheduler_for(self.config(changes), optimizer, steps, epoch)
        if scheduler is None:  # of a constant rate
            scheduler = LambdaLR(optimizer, lambda step: 1.0)
        assert isinstance(scheduler, LambdaLR)
        return scheduler

    def rates(
        self,
        steps: int,
        changes: Mapping[str, Any] | None = None,
        peaks: Sequence[float] = (PEAK,),
    ) -> list[list[float]]:
        """Return the rates of all groups at each step, and after the last one."""
        scheduler = self.scheduler(steps, changes, peaks)
        rates = [scheduler.get_last_lr()]
        for _ in range(steps):
            scheduler.optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
        return [[float(rate) for rate in rates_of_step] for rates_of_step in rates]

    def train(self, run: str, until: int = STEPS) -> None:
        """Train a new model, or go on with ``run``, to step ``until``."""
        changes = {"out": str(self.folder / run), "max_steps": STEPS, "resume": "auto"}
        with Session(self.config(changes), model, rows()) as session:
            step_until(session, summed_loss, until)


def schedule_lab(name: str, settings: Mapping[str, Any], folder: Path) -> ScheduleLab:
    """Return the lab of a schedule, by its name or as ``file.py:function``; raises DistcoreError
    if it does not exist, or its options do not fit.
    """
    changes = {
        "schedule.name": name,
        "device": "cpu",
        "lr": PEAK,
        "nproc": 1,
        "strategy": "single",
        "global_batch_size": BATCH,
        "micro_batch_size": 4,
    }
    lab = ScheduleLab(changes | dict(settings), folder)
    lab.scheduler(STEPS)
    return lab


def model() -> nn.Module:
    """Return a line, whose step depends on each rate."""
    return nn.Linear(1, 1)


def rows() -> TensorDataset:
    """Return the points of a sine, as many as an epoch has."""
    x = torch.linspace(-1, 1, EPOCH * BATCH)[:, None]
    return TensorDataset(x, x.sin())


def summed_loss(module: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the loss of a batch, summed over its rows."""
    x, y = batch
    return mse_loss(module(x), y, reduction="sum")
