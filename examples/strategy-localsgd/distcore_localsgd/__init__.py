"""Local SGD (Stich, 2019, https://arxiv.org/abs/1805.09767): ranks train alone and meet every ``every`` steps."""

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
    gather_rows,
    hookimpl,
    join_process_group,
    leave_process_group,
    sum_over_ranks,
)


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Step on local gradients; every ``every`` steps average gradients, then parameters and moments, over ranks."""

    every: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two meetings; 1 is synchronous training, in which law 2 holds."""

    @property
    def capabilities(self) -> Capabilities:
        """At ``every=1`` nothing is exempt; above, ranks drift apart between meetings, by design."""
        drift = f"ranks step on their own gradients and meet every {self.every} steps"
        laws = ("gradient", "clipping", "checkpoint", "resume") if self.every > 1 else ()
        return Capabilities(
            spec_version=2,
            gradients="mean",
            # Between meetings each rank has a loss scale of its own, and would skip steps of its own.
            precisions=frozenset({"fp32", "bf16", "fp16"} if self.every == 1 else {"fp32", "bf16"}),
            collectives_per_step=1 if self.every == 1 else None,
            limits=("between two meetings each rank evaluates its rows with its own weights",),
            exempt=dict.fromkeys(laws, drift),
        )

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        return join_process_group(config, rank_info)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        model = model.to(run.world.device)
        return PreparedModel(model=model, optimizer=make_optimizer(model) if make_optimizer else None)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        optimizer = run.optimizer
        assert optimizer is not None  # a run that trains has one
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        meeting = self._steps_taken(optimizer) % self.every == self.every - 1
        if meeting:
            average(p.grad for p in parameters if p.grad is not None)
        result = defaults.step(run, clip)
        if meeting:
            self._meet(optimizer)
        return result

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """A checkpoint is a meeting too: it has one model, not a different one for each rank."""
        assert run.optimizer is not None
        self._meet(run.optimizer)
        return defaults.save_checkpoint(run)

    @hookimpl
    def teardown(self, world: World) -> bool:
        return leave_process_group(world)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Average what has drifted apart since the last meeting; at ``every=1`` nothing has."""
        if self.every > 1:
            average(p.data for group in optimizer.param_groups for p in group["params"])
            moments = ((name, value) for state in optimizer.state.values() for name, value in state.items())
            average(value for name, value in moments if name != "step")

    def _steps_taken(self, optimizer: torch.optim.Optimizer) -> int:
        """Steps so far, kept where a checkpoint keeps it, so that a resumed run meets when it would have."""
        return int(next(iter(optimizer.state.values()), {}).get("step", 0))


def average(tensors: Iterable[Tensor]) -> None:
    """Average each tensor over ranks, in place; one collective for all of them."""
    parts = list(tensors)
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(mean.view_as(part))
