"""What lives in a step without values is what lives in one that has them."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from distcore.planning.storages import Storages


def most_of(storages: Storages) -> int:
    return max(accumulate(change for _, change in storages.changes))


def test_a_second_gradient_is_added_to_the_first_in_place() -> None:
    size, storages = 4 * 10**6, Storages()
    with storages.tracing():
        weight = nn.Parameter(torch.empty(10**6))
        storages.count([weight])
        (weight * 2).sum().add((weight * 3).sum()).backward()
        assert weight.grad is not None
    assert 3 * size <= most_of(storages) < 3.01 * size  # the weight and its two gradients, but no sum beside them


def test_to_the_gradient_of_a_linear_layer_another_is_not_added_in_place() -> None:
    """It is a view. A weight that an embedding shares, as GPT-2's, so has two gradients and their sum at a time."""
    size, storages = 4 * 10**6, Storages()
    with storages.tracing():
        weight = nn.Parameter(torch.empty(10**5, 10))
        storages.count([weight])
        embedded = nn.functional.embedding(torch.tensor([[0, 1]]), weight)
        nn.functional.linear(embedded, weight).sum().backward()
    assert 4 * size <= most_of(storages) < 4.5 * size
