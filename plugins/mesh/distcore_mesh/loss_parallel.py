"""Loss parallelism: logits of a split vocabulary stay split; ranks exchange few numbers a row.

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
# Not Tensor.shape.__get__: its type is that of a shape, not of the attribute.
SHAPE: Any = getattr(Tensor, "shape").__get__  # noqa: B009
REDUCTIONS = ("sum", "mean", "none")


class SplitLogits(Tensor):
    """This rank's part of logits that are split along the last dimension.

    All operations but the loss gather them.
    """

    group: ParallelGroup

    @staticmethod
    def wrap(part: Tensor, group: ParallelGroup) -> SplitLogits:
        """Return ``part``, shape ``(…, vocabulary / ranks)``, as split logits of a group.

        Gradients flow through.
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
                part = logits.as_subclass(Tensor)
                group = logits.group
                *leading, vocabulary_part = part.shape
                whole_shape = torch.Size((*leading, vocabulary_part * group.size))
                if func == SHAPE:
                    return whole_shape
                if func is Tensor.size and not named:
                    return whole_shape[args[1]] if args[1:] else whole_shape
                if func is Tensor.float:
                    return SplitLogits.wrap(part.float(), group)
                # Tasks flatten rows and tokens by either call.
                flattening = ((Tensor.flatten, 0, 1), (Tensor.view, -1, whole_shape[-1]))
                if (func, *args[1:]) in flattening and part.dim() == 3:
                    return SplitLogits.wrap(part.flatten(0, 1), group)
                if func is F.cross_entropy:
                    loss = _cross_entropy(part, group, *args[1:], **named)
                    if loss is not None:
                        return loss
            whole_args, whole_named = tree_map(_gather, (args, named))
            return func(*whole_args, **whole_named)


def _gather(value: Any) -> Any:
    """Return split logits whole, and anything else as it is."""
    if isinstance(value, SplitLogits):
        return value.group.gather(value.as_subclass(Tensor))
    return value


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
    """Return torch's ``cross_entropy`` of the whole logits; ``None`` for unsupported arguments."""
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    has_classes = target.dim() == 1 and not target.is_floating_point()
    if not is_plain or part.dim() != 2 or not has_classes or reduction not in REDUCTIONS:
        return None
    is_counted = target != ignore_index
    classes = target.masked_fill(~is_counted, 0)
    losses: Tensor = _Losses.apply(part.float(), classes, group)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(~is_counted, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / is_counted.sum()


class _Losses(torch.autograd.Function):
    """The negative log of the softmax at each target, shape ``(n,)``, in two small all-reduces."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, group: ParallelGroup) -> Tensor:
        size = part.shape[-1]
        column = target - group.rank * size
        is_own = (column >= 0) & (column < size)
        # A target of another rank's part: any column, whose logit is then not counted.
        columns = column.masked_fill(~is_own, 0).unsqueeze(-1)

        # Without the largest logit the exponentials would overflow.
        largest = part.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
        shifted = part - largest.unsqueeze(-1)
        logit_of_target = shifted.gather(-1, columns).squeeze(-1).masked_fill(~is_own, 0.0)

        # In place, since a tensor of the size of the logits is large.
        powers = shifted.exp_()
        sums = torch.stack((powers.sum(-1), logit_of_target))
        totals = group.all_reduce(sums)
        total_power, total_logit = totals[0], totals[1]
        softmax = powers.div_(total_power.unsqueeze(-1))
        ctx.save_for_backward(softmax, columns, is_own)
        return total_power.log() - total_logit

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, columns, is_own = ctx.saved_tensors
        part = softmax * gradient.unsqueeze(-1)
        of_targets = -(gradient * is_own).unsqueeze(-1)
        part.scatter_add_(-1, columns, of_targets)
        return part, None, None


def check_head(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise StrategyError, one line, unless ``styles`` split the model's head by vocabulary."""
    for name, style in styles.items():
        if style == GATHERED and name.endswith(BASE):
            raise StrategyError(
                "strategy_options.loss_parallel: not with an adapter of the head,"
                f" {name.removesuffix(BASE)}; leave it out"
            )
    if GATHERED not in styles.values():
        name = type(model).__name__
        raise StrategyError(
            f"strategy_options.loss_parallel: the plan splits no head of {name} ({GATHERED}), or"
            " its vocabulary does not divide; leave it out"
        )


def keep_split(group: ParallelGroup) -> Callable[..., Tensor]:
    """Return a forward hook that keeps an output split in training; evaluation gathers it."""

    def wrap_output(_module: object, _inputs: object, part: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and part.requires_grad):
            return group.gather(part)
        group.forget()
        return SplitLogits.wrap(part, group)

    return wrap_output
