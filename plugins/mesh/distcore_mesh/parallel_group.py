"""Differentiable collectives of a group of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distcore_mesh.mask_parts import WHOLE, split_features

Map = Callable[[Tensor], Tensor]
"""A map from a tensor, such as a gradient, to a tensor."""


@dataclass(frozen=True, eq=False)
class ParallelGroup:
    """The ranks that share layers or sequences, and their collectives.

    ``enter``, ``add``, ``gather``, ``own_part``, ``gather_tokens``, ``add_tokens`` and ``exchange``
    are differentiable; the methods with names of collectives are not.
    """

    process_group: dist.ProcessGroup
    """The ranks."""
    rank: int
    """This rank's number in the group."""
    size: int
    """Number of ranks."""
    _entered: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The inputs of the running split part, and the tensors that ``enter`` made of them.

    It is empty between split parts.
    """

    def enter(self, whole: Tensor) -> Tensor:
        """Return ``whole``, the same on every rank, as input of a split part.

        Its gradient is summed over the ranks. Layers that take the same tensor one after another,
        such as query, key and value, share one sum.
        """
        split_features((self.rank, self.size))
        for last, entered in self._entered:
            if last is whole:
                return entered
        entered = self.enter_alone(whole)
        if entered is not whole:
            self._entered.append((whole, entered))
        return entered

    def forget(self) -> None:
        """Forget the inputs of a split part, which has ended."""
        self._entered.clear()
        split_features(WHOLE)

    def enter_alone(self, whole: Tensor) -> Tensor:
        """Return ``whole`` as ``enter`` does, with a sum of its own."""
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return whole

        def view(tensor: Tensor) -> Tensor:
            return tensor.view_as(tensor)

        def sum_gradient(gradient: Tensor) -> Tensor:
            # A copy, since a backward pass must not change the gradient that it is given.
            copy = gradient.clone(memory_format=torch.contiguous_format)
            return self.all_reduce(copy)

        return _map(whole, view, sum_gradient)

    def add(self, part: Tensor) -> Tensor:
        """Sum ``part`` over the ranks, in place. The gradient of each part is that of the sum."""
        self.forget()
        total: Tensor = _Add.apply(part, self)  # type: ignore[no-untyped-call]
        return total

    def gather(self, part: Tensor, dimension: int = -1) -> Tensor:
        """Return the parts of all ranks, joined along a dimension."""
        self.forget()
        join = partial(self.all_gather, dimension=dimension)
        split = partial(self.chunk, dimension=dimension)
        return _map(part, join, split)

    def own_part(self, whole: Tensor, dimension: int = -1) -> Tensor:
        """Return this rank's part of ``whole``, along a dimension."""
        split = partial(self.chunk, dimension=dimension)
        join = partial(self.all_gather, dimension=dimension)
        return _map(whole, split, join)

    def gather_tokens(self, part: Tensor) -> Tensor:
        """Return the tokens of all ranks, joined along dimension 1.

        Each rank gets its part of the summed gradient.
        """
        join = partial(self.all_gather, dimension=1)
        sum_and_split = partial(self.reduce_scatter, dimension=1)
        return _map(part, join, sum_and_split)

    def add_tokens(self, part: Tensor) -> Tensor:
        """Sum ``part`` over the ranks, and return this rank's tokens: its chunk of dimension 1."""
        sum_and_split = partial(self.reduce_scatter, dimension=1)
        join = partial(self.all_gather, dimension=1)
        return _map(part, sum_and_split, join)

    def exchange(self, whole: Tensor, cut: int, join: int) -> Tensor:
        """Split along ``cut``, send each rank its part, and join received parts along ``join``."""
        exchange = partial(self.all_to_all, cut=cut, join=join)
        exchange_back = partial(self.all_to_all, cut=join, join=cut)
        return _map(whole, exchange, exchange_back)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        dist.all_reduce(values, group=self.process_group)
        return values

    def all_gather(self, part: Tensor, dimension: int) -> Tensor:
        """Return the parts of all ranks, joined along a dimension."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.process_group)
        return torch.cat(parts, dimension)

    def reduce_scatter(self, part: Tensor, dimension: int) -> Tensor:
        """Sum ``part`` over the ranks, and return this rank's chunk of it along a dimension."""
        # torch splits along the first dimension.
        sent = torch.cat(part.chunk(self.size, dimension))
        length, *others = sent.shape
        received = sent.new_empty((length // self.size, *others))
        dist.reduce_scatter_tensor(received, sent.contiguous(), group=self.process_group)
        return received

    def chunk(self, whole: Tensor, dimension: int) -> Tensor:
        """Return this rank's chunk along a dimension."""
        return whole.chunk(self.size, dimension)[self.rank].contiguous()

    def all_to_all(self, tensor: Tensor, cut: int, join: int) -> Tensor:
        """Split along ``cut``, send each rank its part, and join received parts along ``join``."""
        sent = torch.stack(tensor.chunk(self.size, cut)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return torch.cat(received.unbind(), join)


class _Map(torch.autograd.Function):
    """Apply one map in the forward pass, and another one to the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _map(tensor: Tensor, there: Map, back: Map) -> Tensor:
    mapped: Tensor = _Map.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return mapped


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ParallelGroup) -> Tensor:
        ctx.mark_dirty(part)
        return group.all_reduce(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
