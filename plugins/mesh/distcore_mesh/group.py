"""What the ranks of a group exchange in the forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Map = Callable[[Tensor], Tensor]
"""A tensor, such as a gradient, to another."""


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
        return _mapped(
            whole,
            lambda tensor: tensor.view_as(tensor),
            lambda gradient: self.sum(gradient.clone(memory_format=torch.contiguous_format)),
        )

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of ``part`` over the ranks, in its place; the gradient of the sum is that of each part."""
        self._entered.clear()
        total: Tensor = _Add.apply(part, self)  # type: ignore[no-untyped-call]
        return total

    def gather(self, part: Tensor, dimension: int = -1) -> Tensor:
        """Return the parts of all ranks, joined along a dimension."""
        self._entered.clear()
        return _mapped(part, partial(self.joined, dimension=dimension), partial(self.cut, dimension=dimension))

    def own_part(self, whole: Tensor, dimension: int = -1) -> Tensor:
        """Return this rank's part of ``whole``, along a dimension."""
        return _mapped(whole, partial(self.cut, dimension=dimension), partial(self.joined, dimension=dimension))

    def gather_tokens(self, part: Tensor) -> Tensor:
        """Return the tokens of all ranks, joined along dimension 1; a rank gets its part of the summed gradient."""
        return _mapped(part, partial(self.joined, dimension=1), partial(self.summed, dimension=1))

    def add_tokens(self, part: Tensor) -> Tensor:
        """Return this rank's tokens, cut along dimension 1, of the sum of ``part`` over the ranks."""
        return _mapped(part, partial(self.summed, dimension=1), partial(self.joined, dimension=1))

    def exchange(self, whole: Tensor, cut: int, join: int) -> Tensor:
        """Cut along one dimension, send each rank its part, and join what comes along another dimension."""
        return _mapped(whole, partial(self.exchanged, cut=cut, join=join), partial(self.exchanged, cut=join, join=cut))

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


class _Mapped(torch.autograd.Function):
    """Map a tensor, and its gradient by another map."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _mapped(tensor: Tensor, there: Map, back: Map) -> Tensor:
    mapped: Tensor = _Mapped.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return mapped


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(part)
        return group.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
