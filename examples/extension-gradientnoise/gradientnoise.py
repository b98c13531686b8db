"""Annealed Gaussian noise on gradients (Neelakantan et al., 2015, arXiv:1511.06807).

At step t the noise has the variance ``scale / (1 + t) ** decay``. It is a function of the run's
seed, the step, the parameter's name and the element, so it is the same on every rank, with any
sharding, and in a resumed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from distcore import ConfigError, PreparedModel, Progress, Run, dtensors, hookimpl

BLOCK = 2**16
"""Elements of a block, the unit of random draws. A rank draws only the blocks
that overlap its shards.
"""


@dataclass
class GradientNoise:
    """Add noise to the gradient of each step, after averaging over ranks and clipping."""

    exempt = dict.fromkeys(
        ("changes-no-weight", "changes-no-answer", "two-ranks"), "it is there to change the run"
    )

    scale: Annotated[float, Field(ge=0)] = 0.01
    """Variance of the noise at the first step."""
    decay: Annotated[float, Field(ge=0)] = 0.55
    """Exponent of the decay of the variance."""

    def __post_init__(self) -> None:
        self._step, self._added = 0, -1

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run) -> Generator[None, PreparedModel, PreparedModel]:
        """Make the strategy's optimizer call ``_add`` at the start of each step."""
        prepared = yield
        if prepared.optimizer is not None:
            names = {parameter: name for name, parameter in run.module.named_parameters()}
            if any(
                p not in names for group in prepared.optimizer.param_groups for p in group["params"]
            ):
                raise ConfigError(
                    f"extension gradientnoise: strategy {run.config.strategy!r} steps flat buffers,"
                    " not the model's parameters; use another one, or DeepSpeed's stage 0"
                )
            prepared.optimizer.register_step_pre_hook(lambda *_: self._add(run, names))
        return prepared

    @hookimpl
    def on_run_start(self, progress: Progress) -> None:
        """Start at the first step of the run, which may be a resumed one."""
        self._step = progress.step

    @hookimpl
    def on_step_end(self, progress: Progress) -> None:
        """Count the step."""
        self._step = progress.step

    @torch.no_grad()
    def _add(self, run: Run, names: dict[Tensor, str]) -> None:
        # Horovod's optimizer is a subclass of torch's: each calls the hook
        if self._added == self._step:
            return
        self._added = self._step
        deviation = (self.scale / (1 + self._step) ** self.decay) ** 0.5
        for parameter, name in names.items():
            if parameter.grad is None:
                continue
            noise = torch.zeros_like(parameter.grad)
            seed = f"{run.config.seed}/{self._step}/{name}"
            # this rank's elements
            dtensors.fill(noise, lambda start, count, seed=seed: gaussian(seed, start, count))
            parameter.grad.add_(noise, alpha=deviation)


def gaussian(seed: str, start: int, count: int) -> Tensor:
    """Return elements ``start`` to ``start + count`` of an infinite sequence of
    normal numbers, shape ``(count,)``.
    """
    first, last = start // BLOCK, (start + count - 1) // BLOCK
    blocks = []
    for number in range(first, last + 1):
        digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        blocks.append(torch.randn(BLOCK, generator=generator))
    return torch.cat(blocks)[start - first * BLOCK :][:count]
