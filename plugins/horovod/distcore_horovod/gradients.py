"""Horovod's DistributedOptimizer, which sends gradients while they are computed, and helpers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distcore import Run, StrategyError, defaults
from distcore_horovod.collectives import broadcast, sum_over_ranks
from distcore_horovod.library import hvd

Op = Literal["average", "sum", "adasum"]
"""How Horovod combines the gradients of ranks."""


class Widened:
    """Sends gradients in bfloat16, which Horovod's sums do not take, in fp32; others as they are.

    The names of the functions are Horovod's.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor to send, and the dtype that its sum gets."""
        sent = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
        return sent, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum in the dtype of the gradient."""
        return tensor.to(dtype)


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    op: Op,
    compression: str,
    groups: int,
) -> Any:
    """Return a DistributedOptimizer around a new ``optimizer``. It would lose existing state.

    ``compression`` is ``none`` or ``fp16``. ``groups`` is the number of gradient groups; 0 leaves
    grouping to Horovod.
    """
    if op != "adasum":
        optimizer.__class__ = _with_all_state(optimizer)
    distributed = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=Widened if compression == "none" else getattr(hvd.Compression, compression),
        op={"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[op],
    )
    if groups and op != "adasum" and hvd.size() > 1:
        group_gradients(distributed, groups)
    return distributed


def _with_all_state(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return a subclass of the optimizer's class whose constructor copies all its attributes.

    Horovod makes another optimizer of the same class from the parameter groups only. It would lose
    other attributes, and fail if the class needs more arguments.
    """

    def take_over(new: torch.optim.Optimizer, groups: object) -> None:
        vars(new).update(vars(optimizer))

    kind = type(optimizer)
    return type(kind.__name__, (kind,), {"__init__": take_over, "__module__": kind.__module__})


class ParameterGroup(tuple[nn.Parameter, ...]):
    """Parameters whose gradients are sent together.

    Hashed by identity: a tuple would hash all of them each time.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def group_gradients(distributed: Any, groups: int) -> None:
    """Make Horovod send gradients in ``groups`` groups, each when it is complete.

    Sums then round alike in every run. Groups have equal numbers of parameters, or one more; there
    are no more groups than parameters.

    Horovod's own argument ``groups`` does the same, but exchanges pickles to agree on an order that
    all ranks already share. Therefore this sets the private fields.
    """
    parameters = [
        p for group in distributed.param_groups for p in group["params"] if p.requires_grad
    ]
    number = max(1, min(groups, len(parameters)))
    bounds = [len(parameters) * index // number for index in range(number + 1)]
    grouped = [ParameterGroup(parameters[start:end]) for start, end in pairwise(bounds)]
    distributed._groups = len(grouped)
    distributed._group_counts = dict.fromkeys(grouped, 0)
    distributed._p_to_group = {p: group for group in grouped for p in group}


def find_unused_parameters(run: Run, *, find: bool) -> Sequence[nn.Parameter]:
    """Return the parameters without a gradient on any rank, by one collective.

    Without ``find`` return none, and raise StrategyError if a parameter on this rank has no
    gradient.
    """
    assert run.optimizer is not None  # only training runs take steps
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    if find:
        has_gradient = [p.grad is not None for p in parameters]
        flags = torch.tensor(has_gradient, dtype=torch.int32, device=run.world.device)
        ranks_with_gradient = sum_over_ranks(flags).tolist()
        pairs = zip(parameters, ranks_with_gradient, strict=True)
        return [parameter for parameter, ranks in pairs if not ranks]
    if any(p.grad is None for p in parameters):
        trained = [(name, p) for name, p in run.module.named_parameters() if p.requires_grad]
        name = next(name for name, p in trained if p.grad is None)
        raise StrategyError(
            f"parameter {name!r} got no gradient in this step; freeze it, or --set"
            " strategy_options.find_unused=true"
        )
    return []


def share_buffers(run: Run) -> None:
    """Broadcast the main rank's buffers, if there are any, before every forward pass.

    They are running statistics.
    """
    parameters = {f"model/{name}" for name, _ in run.module.named_parameters()}
    state = defaults.model_state(run)
    buffers = {name: value for name, value in state.items() if name not in parameters}
    if buffers:
        run.module.register_forward_pre_hook(lambda module, inputs: broadcast(buffers))
