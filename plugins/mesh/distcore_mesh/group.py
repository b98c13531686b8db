"""What the ranks of a group exchange in the forward and backward passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that share layers, or sequences, and what they exchange.

    A gradient passes through ``enter``, ``add``, ``gather``, ``own_part`` and ``exchange``.
    """

    process_group: dist.ProcessGroup
    """The ranks."""
    rank: int
    """This rank's number in the group."""
    size: int
    """Number of ranks."""
    _entered: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The tensor that entered the split part which is running, and what it became; nothing between such parts."""

    def enter(self, whole: Tensor) -> Tensor:
        """Return ``whole``, the same on every rank, for use in a part; its gradient is summed over the ranks.

        Layers that take the same tensor one after another, such as query, key and value, share one sum.
        """
        for last, became in self._entered:
            if last is whole:
                return became
        entered = self.enter_alone(whole)
        if entered is not whole:
            self._entered[:] = [(whole, entered)]
        return entered

    def forget(self) -> None:
        """Forget what entered: the split part that took it has ended, and its result stays split."""
        self._entered.clear()

    def enter_alone(self, whole: Tensor) -> Tensor:
        """Return ``whole`` as ``enter`` does, with a sum of its own."""
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return whole
        entered: Tensor = _Enter.apply(whole, self)  # type: ignore[no-untyped-call]
        return entered

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of ``part`` over the ranks, in its place; the gradient of the sum is that of each part."""
        self._entered.clear()
        total: Tensor = _Add.apply(part, self)  # type: ignore[no-untyped-call]
        return total

    def gather(self, part: Tensor, dimension: int = -1) -> Tensor:
        """Return the parts of all ranks, joined along a dimension."""
        self._entered.clear()
        whole: Tensor = _Gather.apply(part, self, dimension)  # type: ignore[no-untyped-call]
        return whole

    def own_part(self, whole: Tensor, dimension: int = -1) -> Tensor:
        """Return this rank's part of ``whole``, along a dimension."""
        part: Tensor = _OwnPart.apply(whole, self, dimension)  # type: ignore[no-untyped-call]
        return part

    def gather_tokens(self, part: Tensor) -> Tensor:
        """Return the tokens of all ranks, joined along dimension 1; a rank gets its part of the summed gradient."""
        whole: Tensor = _GatherTokens.apply(part, self)  # type: ignore[no-untyped-call]
        return whole

    def add_tokens(self, part: Tensor) -> Tensor:
        """Return this rank's tokens, cut along dimension 1, of the sum of ``part`` over the ranks."""
        own: Tensor = _AddTokens.apply(part, self)  # type: ignore[no-untyped-call]
        return own

    def exchange(self, whole: Tensor, cut: int, join: int) -> Tensor:
        """Cut along one dimension, send each rank its part, and join what comes along another dimension."""
        exchanged: Tensor = _Exchange.apply(whole, self, cut, join)  # type: ignore[no-untyped-call]
        return exchanged

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in its place."""
        dist.all_reduce(values, group=self.process_group)
        return values

    def joined(self, part: Tensor, dimension: int) -> Tensor:
        """Return the parts of all ranks, joined along a dimension, without a gradient."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.process_group)
        return torch.cat(parts, dimension)

    def summed(self, part: Tensor, dimension: int) -> Tensor:
        """Return this rank's part, along a dimension, of the sum of ``part`` over the ranks, without a gradient."""
        sent = torch.cat(part.chunk(self.size, dimension))
        own = sent.new_empty((sent.shape[0] // self.size, *sent.shape[1:]))
        dist.reduce_scatter_tensor(own, sent.contiguous(), group=self.process_group)
        return own

    def cut(self, whole: Tensor, dimension: int) -> Tensor:
        """Return this rank's part along a dimension, without a gradient."""
        return whole.chunk(self.size, dimension)[self.rank].contiguous()

    def exchanged(self, tensor: Tensor, cut: int, join: int) -> Tensor:
        """Return what ``exchange`` does, without a gradient."""
        sent = torch.stack(tensor.chunk(self.size, cut)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return torch.cat(received.unbind(), join)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(part)
        return group.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, dimension: int) -> Tensor:
        ctx.group, ctx.dimension = group, dimension
        return group.joined(part, dimension)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.cut(gradient, ctx.dimension), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, dimension: int) -> Tensor:
        ctx.group, ctx.dimension = group, dimension
        return group.cut(whole, dimension)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.joined(gradient, ctx.dimension), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return group.exchanged(whole, cut, join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.exchanged(gradient, ctx.join, ctx.cut), None, None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.joined(part, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.summed(gradient, 1), None


class _AddTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.summed(part, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.joined(gradient, 1), None
