"""The job of benchmarks/native_parity.py: what a hand-written script shares with distcore, so that losses can be equal.

A native script is a module with ``train(job: Job) -> Timing``, called in every rank: it writes its own loop on its
backend, over ``job.steps()``, with ``job.model()``, and calls ``clock.tick(loss)`` after every optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from distcore import Datasets, RunConfig, Task
from distcore.plugin.sampling import BatchPlan, training_plan

WARM_UP = 5
LOG_EVERY = 20


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each step after the warm-up, and the global mean loss at each log line."""

    step_seconds: list[float]
    losses: list[float]


def durations(ends: list[float]) -> list[float]:
    """Seconds of each step after the warm-up, from the times at which steps ended."""
    return [after - before for before, after in pairwise(ends[WARM_UP - 1 :])]


@dataclass(frozen=True, kw_only=True)
class Job:
    """BERT text classification with full batches, linear decay and clipping; dropout off."""

    config: RunConfig
    data: Datasets
    task: Task
    rank: int
    size: int

    @property
    def total_steps(self) -> int:
        assert self.config.max_steps is not None
        return self.config.max_steps

    @property
    def lr(self) -> float:
        assert isinstance(self.config.lr, float)  # the benchmark states it
        return self.config.lr

    def model(self) -> Any:
        """The task's model, which has more methods than every ``nn.Module``."""
        torch.manual_seed(self.config.seed)
        return self.task.build_model(self.config, self.data)

    def groups(self, model: nn.Module) -> list[dict[str, object]]:
        """Parameter groups of AdamW: no decay on biases and normalisation weights."""
        named = list(model.named_parameters())
        plain = [p for name, p in named if name.endswith("bias") or "LayerNorm" in name]
        decayed = [p for name, p in named if not (name.endswith("bias") or "LayerNorm" in name)]
        return [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]

    def rate(self, step: int) -> float:
        """Factor on the learning rate: linear decay to zero."""
        return max(0.0, (self.total_steps - step) / self.total_steps)

    def steps(self) -> Iterator[list[dict[str, Tensor]]]:
        """This rank's micro-batches of every optimizer step, collated when they are asked for."""
        plan: BatchPlan = training_plan(self.config, self.data.train)
        for step in range(self.total_steps):
            micros = plan.split(step // plan.steps, step % plan.steps, self.rank, self.size)
            yield [self.data.train.batch(micro.indices) for micro in micros]


@dataclass(kw_only=True)
class Clock:
    """Times steps, and averages the loss over ranks at every log line with the script's own ``mean``."""

    job: Job
    mean: Callable[[Tensor], Tensor]
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _sum: Tensor | float = 0.0

    def tick(self, loss: Tensor) -> None:
        """Count one optimizer step; ``loss`` is this rank's mean loss over its rows of the step, detached."""
        self._sum = self._sum + loss
        if (len(self.times) + 1) % LOG_EVERY == 0:
            self.losses.append(float(self.mean(torch.as_tensor(self._sum).double().reshape(1))) / LOG_EVERY)
            self._sum = 0.0
        self.times.append(time.perf_counter())

    def timing(self) -> Timing:
        return Timing(step_seconds=durations(self.times), losses=self.losses)
