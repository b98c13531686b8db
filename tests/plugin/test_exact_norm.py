"""The norm of ``exact``: one result for any shards and any order, NaN and infinity included."""

from __future__ import annotations

import math

import pytest
import torch

from distcore.plugin.strategy.exact_norm import exact_squared_norm
from distcore.plugin.strategy.gradient_norm import squared_norm

RANDOM = torch.Generator().manual_seed(0)
MANY = torch.randn(120_003, generator=RANDOM) * 10 ** (
    12 * torch.rand(120_003, generator=RANDOM) - 9
)


def test_any_parts_in_any_order_have_the_same_bits() -> None:
    ways = [
        [MANY],
        *(list(MANY.tensor_split(count)) for count in (2, 3, 5)),
        [MANY[torch.randperm(len(MANY), generator=RANDOM)]],
        [MANY[:0], MANY[7:], MANY[:7]],
        [MANY.view(3, -1).T],
    ]
    assert len({float(exact_squared_norm(parts)) for parts in ways}) == 1
    # Sums in fp64 that are not exact have other ones.
    assert len({float(squared_norm(parts)) for parts in ways}) > 1


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e15])
def test_it_is_the_true_one(scale: float) -> None:
    gradient = MANY * scale
    true = math.fsum(gradient.double().square().tolist())
    assert float(exact_squared_norm([gradient])) == pytest.approx(true, rel=1e-14)


def test_what_is_no_number_shows() -> None:
    assert float(exact_squared_norm([torch.zeros(3), torch.zeros(0)])) == 0.0
    assert float(exact_squared_norm([])) == 0.0
    infinite, no_number = torch.tensor([1.0, math.inf]), torch.tensor([math.nan, 1.0])
    assert float(exact_squared_norm([infinite])) == math.inf
    assert math.isnan(float(exact_squared_norm([infinite, no_number])))
    assert math.isnan(float(exact_squared_norm([no_number, torch.ones(20_000)])))
