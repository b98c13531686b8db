"""Local SGD (Stich, 2019, https://arxiv.org/abs/1805.09767): ranks train alone and
average every K steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from distcore import (
    Capabilities,
    Clip,
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
            lacks=frozenset({"sparse gradients", "complex parameters"}),
            limits=("between two averagings each rank evaluates its rows with its own weights",),
            exempt=dict.fromkeys(laws, drift),
        )

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group."""
        return join_process_group(config, rank_info)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Average gradients at the end of the last micro-batch, every ``every`` steps.

        Extensions that wrap the step then see the whole gradient.
        """
        assert run.optimizer is not None  # a run that trains has one
        is_due = last and self._is_averaging_due(run.optimizer)
        return averaged_gradients(run.optimizer) if is_due else nullcontext()

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Take a local step; every ``every`` steps, average the model after it."""
        assert run.optimizer is not None
        is_due = self._is_averaging_due(run.optimizer)  # asked before the step, which counts
        result = defaults.step(run, clip)
        if is_due:
            self._average_state(run.optimizer)
        return result

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Average parameters first, because a checkpoint holds one model, not one per rank."""
        if run.optimizer is not None:  # else the core asks for the weights alone
            self._average_state(run.optimizer)
        return defaults.save_checkpoint(run)

    def _average_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Average parameters and moments, which differ between ranks since the
        last averaging, unless ``every=1``.
        """
        if self.every > 1:
            average(p.data for group in optimizer.param_groups for p in group["params"])
            moments = (pair for state in optimizer.state.values() for pair in state.items())
            average(value for name, value in moments if name != "step")

    def _is_averaging_due(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the next step averages.

        The optimizer's state has the number of steps so far, which a resumed run gets back.
        """
        steps_taken = int(next(iter(optimizer.state.values()), {}).get("step", 0))
        return steps_taken % self.every == self.every - 1


@contextmanager
def averaged_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Average gradients over ranks after the ``with`` block; one that no rank has stays absent."""
    yield
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # A rank whose rows passed no layer has no gradient for it, and must send zeros all the same.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    is_present = [float(p.grad is not None) for p in parameters]
    shares = torch.tensor(is_present, device=parameters[0].device)
    average([*gradients, shares])
    for parameter, gradient, share in zip(parameters, gradients, shares.tolist(), strict=True):
        parameter.grad = gradient if share else None


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
