"""Horovod's optimizer, which sends gradients while they are computed, and what it needs around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from distcore import Run, StrategyError, defaults
from distcore_horovod.library import hvd
from distcore_horovod.wire import broadcast, total

Op = Literal["average", "sum", "adasum"]


def distribute(model: nn.Module, optimizer: torch.optim.Optimizer, op: Op, compression: str, groups: int) -> Any:
    """Return ``optimizer`` wrapped by Horovod's DistributedOptimizer; the optimizer's own state would be lost."""
    distributed = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        op={"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[op],
    )
    if groups and op != "adasum" and hvd.size() > 1:
        bind(distributed, groups)
    return distributed


class Group(tuple[nn.Parameter, ...]):
    """Gradients that are sent together. Its identity is its hash: a tuple's asks every parameter, at every look."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def bind(distributed: Any, groups: int) -> None:
    """Have gradients sent in so many groups, each when it is whole, so that sums round the same in every run.

    Horovod's argument ``groups`` does the same, but sends pickles to agree on an order that ranks have anyway.
    """
    parameters = [p for group in distributed.param_groups for p in group["params"] if p.requires_grad]
    size = -(-len(parameters) // groups)
    bound = [Group(parameters[start : start + size]) for start in range(0, len(parameters), size)]
    distributed._groups = len(bound)
    distributed._group_counts = dict.fromkeys(bound, 0)
    distributed._p_to_group = {p: group for group in bound for p in group}


def without_gradient(run: Run, *, find: bool) -> Sequence[nn.Parameter]:
    """Parameters that got no gradient on any rank; with ``find`` a collective, else there must be none on this one."""
    assert run.optimizer is not None  # the loop only steps runs that train
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    if find:
        flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=run.world.device)
        return [p for p, ranks in zip(parameters, total(flags).tolist(), strict=True) if not ranks]
    if any(p.grad is None for p in parameters):
        name = next(name for name, p in run.module.named_parameters() if p.requires_grad and p.grad is None)
        raise StrategyError(
            f"parameter {name!r} took no part in this step; freeze it, or --set strategy_options.find_unused=true"
        )
    return []


def share_buffers(run: Run) -> None:
    """Before every forward pass, give all ranks the main rank's running statistics; for a model that keeps any."""
    parameters = {f"model/{name}" for name, _ in run.module.named_parameters()}
    buffers = {name: value for name, value in defaults.model_state(run).items() if name not in parameters}
    if buffers:
        run.module.register_forward_pre_hook(lambda module, inputs: broadcast(buffers))
