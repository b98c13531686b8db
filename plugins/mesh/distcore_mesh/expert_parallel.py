"""Expert parallelism: each rank of a group holds some experts of a layer, and computes them for
the tokens of all ranks.

Ranks of ``ep`` have rows of their own. The router, on the rank of each token, chooses experts. A
first exchange brings a copy of the token to the rank of each chosen expert, and a second one brings
the results back, where they are weighted and added. So the router's gradient stays on its rank, and
the gradient of an expert is a sum over the tokens of the group.

Ranks of ``tp`` have the same rows. Each computes its experts for all tokens, and the results are
added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcore_mesh.experts import find_experts, splits_of_experts
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.tensor_layout import TensorSplit

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``forward(hidden, chosen, weights)``: the weighted sum of the chosen experts' outputs.

Shapes are ``(tokens, size)``, ``(tokens, k)`` and ``(tokens, k)``.
"""


class Place(NamedTuple):
    """The number of a rank among those that share experts."""

    rank: int
    """Its number."""
    ranks: int
    """How many they are."""


def split_experts(
    model: nn.Module, owners: ParallelGroup | None, sharers: ParallelGroup
) -> tuple[dict[str, TensorSplit], Place]:
    """Keep this rank's experts alone, in place; return the split of each parameter, and its place.

    ``owners`` have rows of their own, ``None``: no others; ``sharers`` have the same rows. The
    model must have passed ``check_experts``.
    """
    owner, of_owners = (owners.rank, owners.size) if owners else (0, 1)
    place = Place(owner * sharers.size + sharers.rank, of_owners * sharers.size)
    splits = splits_of_experts(model)
    with torch.no_grad():
        for name, split in splits.items():
            parameter = model.get_parameter(name)
            parameter.data = split.part_of(parameter.data, *place)
    for module in find_experts(model).values():
        of_owner = module.num_experts // of_owners
        module.num_experts = of_owner // sharers.size  # read by the module's own forward
        if sharers.size > 1:
            module.forward = _add_results(sharers, module.num_experts, module.forward)
        if owners is not None:
            module.forward = _exchange_tokens(owners, of_owner, module.forward)
    return splits, place


@dataclass(frozen=True)
class Dispatch:
    """The way of a layer's tokens to the ranks of their experts."""

    group: ParallelGroup
    """The ranks."""
    order: Tensor
    """The choices of this rank's tokens, by expert and so by rank: ``(tokens * k,)``."""
    sent: list[int]
    """Tokens that this rank sends to each rank."""
    received: list[int]
    """Tokens that it receives from each."""
    experts: Tensor
    """The number, among this rank's experts, of the one for each token that is received."""

    @classmethod
    def of_choices(cls, group: ParallelGroup, chosen: Tensor, each: int) -> Dispatch:
        """Return it for ``chosen``, the experts of each token, where each rank has ``each``."""
        picked = chosen.reshape(-1)
        counts = picked.bincount(minlength=each * group.size).view(group.size, each)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group.process_group)
        numbers = torch.arange(each, device=chosen.device).repeat(group.size)
        return cls(
            group,
            # Stable: the order of an expert's tokens is that of the rows.
            order=picked.argsort(stable=True),
            sent=counts.sum(1).tolist(),
            received=arriving.sum(1).tolist(),
            experts=numbers.repeat_interleave(arriving.reshape(-1)),
        )

    def out(self, tokens: Tensor) -> Tensor:
        """Send tokens in the order of choices; return those that arrive. Differentiable."""
        return _exchange(tokens, self.group, self.sent, self.received)

    def back(self, results: Tensor) -> Tensor:
        """Send the results back; return those of this rank's choices in their order."""
        arrived = _exchange(results, self.group, self.received, self.sent)
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(self.order), device=self.order.device)
        return arrived[places]


def _exchange_tokens(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """Return a forward for ranks with rows of their own and ``each`` experts."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        dispatch = Dispatch.of_choices(group, chosen, each)
        tokens = dispatch.out(hidden[dispatch.order // chosen.shape[1]])
        results = dispatch.back(_computed(experts, tokens, dispatch.experts))
        # Weighted at home, so that the router's gradient needs no exchange.
        weighted = results.view(*chosen.shape, -1) * weights[..., None]
        return weighted.sum(1).to(hidden.dtype)

    return forward


def _computed(experts: Forward, tokens: Tensor, numbers: Tensor) -> Tensor:
    """Return the output of one expert for each token, ``(tokens, size)``.

    Without tokens a token of zeros is computed and cut off again: the parameters get a gradient
    of zeros, as in one process, and the backward pass makes the exchanges that others wait for.
    """
    if len(tokens):
        return experts(tokens, numbers[:, None], tokens.new_ones(len(tokens), 1))
    padding = tokens.sum(0, keepdim=True)
    first = numbers.new_zeros(1, 1)
    return experts(padding, first, tokens.new_ones(1, 1))[:0]


def _add_results(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """Return a forward for ranks with the same rows and ``each`` experts."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # Each rank has its experts' share of the gradients of both.
        hidden = group.enter_alone(hidden)
        weights = group.enter_alone(weights)
        here = chosen - group.rank * each
        is_foreign = (here < 0) | (here >= each)
        # A foreign choice becomes expert 0 with a constant weight of 0: neither the expert nor
        # the router gets a gradient for it.
        own_choices = here.masked_fill(is_foreign, 0)
        own_weights = weights.masked_fill(is_foreign, 0.0)
        return group.add(experts(hidden, own_choices, own_weights))

    return forward


def _exchange(rows: Tensor, group: ParallelGroup, sent: list[int], received: list[int]) -> Tensor:
    """Send ``sent[r]`` rows to each rank r; return the rows that arrive, ``received[r]`` from each.

    Their gradient goes the other way.
    """
    arrived: Tensor = _Exchange.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ParallelGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.way_back = (group, received, sent)
        return _send(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(gradient, *ctx.way_back), None, None, None


def _send(rows: Tensor, group: ParallelGroup, sent: list[int], received: list[int]) -> Tensor:
    """Exchange rows without a gradient."""
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(
        arrived,
        rows.contiguous(),
        received,
        sent,
        group=group.process_group,
    )
    return arrived
