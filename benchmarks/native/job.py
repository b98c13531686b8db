"""The job of benchmarks/native_parity.py: what hand-written scripts share with distcore, so that
losses can be equal.

A script is a module with ``train(job: Job) -> Timing``, which is called in every rank. It has its
own loop over ``job.steps()`` with ``job.model()`` on its backend, and calls ``clock.tick(loss)``
after every optimizer step.
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
from distcore.plugin.batching.sampling import BatchPlan, training_plan

WARM_UP = 5
"""First steps, which are not timed."""
LOG_EVERY = 20
"""Steps between two log lines."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The result of one run in one rank."""

    step_seconds: list[float]
    """Duration of each step after the warm-up."""
    losses: list[float]
    """Mean loss over all ranks since the last log line, at each log line."""


def durations(ends: list[float]) -> list[float]:
    """Return the seconds of each step after the warm-up, from the times at which steps ended."""
    return [after - before for before, after in pairwise(ends[WARM_UP - 1 :])]


@dataclass(frozen=True, kw_only=True)
class Job:
    """BERT text classification with full batches, linear decay, clipping, and no dropout."""

    config: RunConfig
    data: Datasets
    task: Task
    rank: int
    size: int
    """Number of ranks."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        assert self.config.max_steps is not None
        return self.config.max_steps

    @property
    def lr(self) -> float:
        """Peak learning rate, stated by the benchmark."""
        assert isinstance(self.config.lr, float)
        return self.config.lr

    def model(self) -> Any:
        """Build the task's model, the same on every rank; untyped, since it has
        more methods than ``nn.Module``.
        """
        torch.manual_seed(self.config.seed)
        return self.task.build_model(self.config, self.data)

    def groups(self, model: nn.Module) -> list[dict[str, object]]:
        """Return the parameter groups of AdamW: no weight decay on
        biases and normalization weights.
        """
        named = list(model.named_parameters())
        plain = [p for name, p in named if name.endswith("bias") or "LayerNorm" in name]
        decayed = [p for name, p in named if not (name.endswith("bias") or "LayerNorm" in name)]
        return [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]

    def rate(self, step: int) -> float:
        """Return the factor on the learning rate: linear decay to zero."""
        return max(0.0, (self.total_steps - step) / self.total_steps)

    def steps(self) -> Iterator[list[dict[str, Tensor]]]:
        """Yield this rank's micro-batches of every optimizer step."""
        plan: BatchPlan = training_plan(self.config, self.data.train)
        for step in range(self.total_steps):
            micros = plan.split(step // plan.steps, step % plan.steps, self.rank, self.size)
            yield [self.data.train.batch(micro.indices) for micro in micros]


@dataclass(kw_only=True)
class Clock:
    """Time steps, and average the loss over ranks at every log line."""

    job: Job
    mean: Callable[[Tensor], Tensor]
    """Averages a value over ranks, on the script's backend."""
    times: list[float] = field(default_factory=list)
    """When each step ended, in seconds of ``time.perf_counter``."""
    losses: list[float] = field(default_factory=list)
    """Mean loss at each log line."""
    _sum: Tensor | float = 0.0

    def tick(self, loss: Tensor) -> None:
        """Count one optimizer step; ``loss`` is this rank's mean loss over its rows
        of the step, detached.
        """
        self._sum = self._sum + loss
        if (len(self.times) + 1) % LOG_EVERY == 0:
            self.losses.append(
                float(self.mean(torch.as_tensor(self._sum).double().reshape(1))) / LOG_EVERY
            )
            self._sum = 0.0
        self.times.append(time.perf_counter())

    def timing(self) -> Timing:
        """Return the times and losses so far."""
        return Timing(step_seconds=durations(self.times), losses=self.losses)
