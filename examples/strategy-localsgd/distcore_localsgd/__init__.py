"""Local SGD (Stich, 2019, https://arxiv.org/abs/1805.09767): ranks train alone and
average every K steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    State,
    StepResult,
    World,
    defaults,
    hookimpl,
    join_process_group,
)


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Step on local gradients; every ``every`` steps average gradients, then parameters
    and moments, over ranks.
    """

    every: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps from one averaging to the next; 1 is synchronous training, in
    which law 2 holds.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The declaration for ``every``: above 1, parameters differ between ranks
        until the next averaging.
        """
        drift = f"ranks step on their own gradients and average every {self.every} steps"
        laws = ("gradient", "clipping", "checkpoint", "resume") if self.every > 1 else ()
        return Capabilities(
            spec_version=3,
            gradients="mean",
            phases=True,
            # Between averagings each rank would have its own loss scale in fp16, and skip
            # its own steps.
            precisions=frozenset({"fp32", "bf16", "fp16"} if self.every == 1 else {"fp32", "bf16"}),
            collectives_per_step=1 if self.every == 1 else None,
            limits=("between two averagings each rank evaluates its rows with its own weights",),
            exempt=dict.fromkeys(laws, drift),
        )

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group."""
        return join_process_group(config, rank_info)

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Move the model to the device, and build its optimizer. No wrapper is needed."""
        model = model.to(run.world.device)
        return PreparedModel(
            model=model, optimizer=make_optimizer(model) if make_optimizer else None
        )

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Take a local step; every ``every`` steps, average gradients before it and
        the model after it.
        """
        optimizer = run.optimizer
        assert optimizer is not None  # a run that trains has one
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        averaging = self._steps_taken(optimizer) % self.every == self.every - 1
        if averaging:
            average(p.grad for p in parameters if p.grad is not None)
        result = defaults.step(run, clip)
        if averaging:
            self._average_state(optimizer)
        return result

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Average parameters first, because a checkpoint holds one model, not one per rank."""
        assert run.optimizer is not None
        self._average_state(run.optimizer)
        return defaults.save_checkpoint(run)

    def _average_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Average parameters and moments, which differ between ranks since the
        last averaging, unless ``every=1``.
        """
        if self.every > 1:
            average(p.data for group in optimizer.param_groups for p in group["params"])
            moments = (
                (name, value) for state in optimizer.state.values() for name, value in state.items()
            )
            average(value for name, value in moments if name != "step")

    def _steps_taken(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of steps so far, from the optimizer's state, which a
        resumed run gets back.
        """
        return int(next(iter(optimizer.state.values()), {}).get("step", 0))


def average(tensors: Iterable[Tensor]) -> None:
    """Average each tensor over ranks, in place, with one collective for all."""
    parts = list(tensors)
    if not parts:  # moments before the first step
        return
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(mean.view_as(part))
