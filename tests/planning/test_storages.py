"""What lives in a step without values is what lives in one that has them."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from distcore.planning.storages import Storages


def test_a_second_gradient_is_added_to_the_first_in_place() -> None:
    size, storages = 4 * 10**6, Storages()
    with storages.tracing():
        weight = nn.Parameter(torch.empty(10**6))
        storages.count([weight])
        (weight * 2).sum().add((weight * 3).sum()).backward()
        assert weight.grad is not None
    most = max(accumulate(change for _, change in storages.changes))
    assert 3 * size <= most < 3.01 * size  # the weight and its two gradients, but no sum beside them
