"""Loss parallelism: the logits of a split vocabulary stay split, and ranks exchange only a
few numbers a row.

A model returns ``SplitLogits``, and tasks compute with them as with any tensor. A cross entropy
with class numbers, and the reshapes that tasks do before it, are computed on the parts. Any other
operation gathers the logits first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distcore import StrategyError
from distcore_mesh.adapters import BASE
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.tp_plans import GATHERED

METADATA = frozenset({Tensor.dim, Tensor.is_floating_point, Tensor.register_hook}) | {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim")
}
"""Attributes and methods that are the same for a part and for the whole."""
SHAPE: Any = getattr(Tensor, "shape").__get__  # noqa: B009 -- its type is that of a shape, not of the attribute
REDUCTIONS = ("sum", "mean", "none")


class SplitLogits(Tensor):
    """This rank's part of logits that are split along the last dimension; all operations but
    the loss gather them.
    """

    group: ParallelGroup

    @staticmethod
    def wrap(part: Tensor, group: ParallelGroup) -> SplitLogits:
        """Return ``part``, shape ``(…, vocabulary / ranks)``, as split logits of a
        group; gradients flow through.
        """
        logits = part.as_subclass(SplitLogits)
        logits.group = group
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute known operations on the part, and all others on the gathered logits."""
        named: dict[str, Any] = kwargs or {}
        logits = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **named)
            if isinstance(logits, SplitLogits):
                part, group = logits.as_subclass(Tensor), logits.group
                whole = torch.Size((*part.shape[:-1], part.shape[-1] * group.size))
                if func == SHAPE:
                    return whole
                if func is Tensor.size and not named:
                    return whole[args[1]] if args[1:] else whole
                if func is Tensor.float:
                    return SplitLogits.wrap(part.float(), group)
                if (func, *args[1:]) in (
                    (Tensor.flatten, 0, 1),
                    (Tensor.view, -1, whole[-1]),
                ) and part.dim() == 3:
                    return SplitLogits.wrap(part.flatten(0, 1), group)
                if (
                    func is F.cross_entropy
                    and (loss := _cross_entropy(part, group, *args[1:], **named)) is not None
                ):
                    return loss
            whole_args, whole_named = tree_map(_gather, (args, named))
            return func(*whole_args, **whole_named)


def _gather(value: Any) -> Any:
    return (
        value.group.gather(value.as_subclass(Tensor)) if isinstance(value, SplitLogits) else value
    )


def _cross_entropy(
    part: Tensor,
    group: ParallelGroup,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return torch's ``cross_entropy`` of the whole logits; ``None`` for arguments
    that are not supported.
    """
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if (
        not plain
        or part.dim() != 2
        or target.dim() != 1
        or target.is_floating_point()
        or reduction not in REDUCTIONS
    ):
        return None
    counted = target != ignore_index
    losses: Tensor = _Losses.apply(part.float(), target.masked_fill(~counted, 0), group)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _Losses(torch.autograd.Function):
    """The negative log of the softmax at each target, shape ``(n,)``, in two small all-reduces."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, group: ParallelGroup) -> Tensor:
        size = part.shape[-1]
        own = target - group.rank * size
        is_own = (own >= 0) & (own < size)
        own = own.masked_fill(~is_own, 0).unsqueeze(-1)
        largest = part.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
        shifted = part - largest.unsqueeze(-1)
        hit = shifted.gather(-1, own).squeeze(-1).masked_fill(~is_own, 0.0)
        powers = shifted.exp_()
        totals = group.all_reduce(torch.stack((powers.sum(-1), hit)))
        ctx.save_for_backward(powers.div_(totals[0].unsqueeze(-1)), own, is_own)
        return totals[0].log() - totals[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, is_own = ctx.saved_tensors
        part = softmax * gradient.unsqueeze(-1)
        part.scatter_add_(-1, own, -(gradient * is_own).unsqueeze(-1))
        return part, None, None


def check_head(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise StrategyError, one line, unless ``styles`` split the head
    of ``model`` by vocabulary.
    """
    if adapted := next(
        (name for name, style in styles.items() if style == GATHERED and name.endswith(BASE)), None
    ):
        name = adapted.removesuffix(BASE)
        raise StrategyError(
            f"strategy_options.loss_parallel: not with an adapter of the head, {name}; leave it out"
        )
    if GATHERED not in styles.values():
        name = type(model).__name__
        raise StrategyError(
            f"strategy_options.loss_parallel: the plan splits no head of {name} ({GATHERED}), or"
            " its vocabulary does not divide; leave it out"
        )


def keep_split(group: ParallelGroup) -> Callable[..., Tensor]:
    """Return a forward hook that leaves a layer's output split in training, and
    gathers it in evaluation.
    """

    def wrap_output(_module: object, _inputs: object, part: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and part.requires_grad):
            return group.gather(part)
        group.forget()
        return SplitLogits.wrap(part, group)

    return wrap_output
