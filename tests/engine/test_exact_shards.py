"""Hooks that make a strategy's own sums of gradients exact, on parameters that nothing shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distcore import Run, RunConfig, World
from distcore.engine import exact_shards
from distcore.engine.exact import GradientSums
from distcore.engine.exact_shards import ShardedSums
from distcore.engine.grid import FINEST
from distcore.plugin.strategy.contract import MicroBatch
from distcore.plugin.strategy.hooks import Hooks
from distcore.strategies.single import SingleStrategy

SCALES = (1.0, 2.0**-30, 2.0**20, 0.3)
"""Factors of the gradients of four blocks."""


@pytest.fixture(autouse=True)
def _whole_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(module: nn.Module) -> list[nn.Parameter]:
        return [each for each in module.parameters() if each.requires_grad]

    monkeypatch.setattr(exact_shards, "gathered_parameters", trained)


def run_of(module: nn.Module) -> Run:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    return Run(
        config=RunConfig(exact=4),
        world=world,
        capabilities=SingleStrategy.capabilities,
        module=module,
        model=module,
    )


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def losses(module: nn.Module) -> Iterator[tuple[MicroBatch, partial[Tensor]]]:
    random = torch.Generator().manual_seed(1)
    for number, scale in enumerate(SCALES):
        rows = torch.randn(2, 5, generator=random)
        micro = MicroBatch(np.arange(2), last=number == len(SCALES) - 1, block=number)
        yield micro, partial(lambda rows, scale: (module(rows).tanh() * scale).sum(), rows, scale)


@pytest.mark.parametrize("bits", [FINEST, 30])
def test_gradients_are_those_of_whole_sums(bits: int) -> None:
    hooks = Hooks("single", SingleStrategy())
    module, twin = layer(), layer()
    sharded, whole = ShardedSums(), GradientSums(list(twin.parameters()))
    run, run_of_twin = run_of(module), run_of(twin)
    sharded.watch(run)
    sharded.watch(run)  # as a further phase does: nothing is rounded twice
    for (micro, loss), (_, loss_of_twin) in zip(losses(module), losses(twin), strict=True):
        added = sharded.add_block(run, hooks, micro, loss, bits)
        expected = whole.add_block(run_of_twin, hooks, micro, loss_of_twin, bits)
        assert (added.loss, added.greatest) == (expected.loss, expected.greatest)
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float64}
    assert torch.equal(torch.cat([each.flatten() for each in gradients]), whole.flat)
    sharded.clear(run)
    assert all(each.grad is None for each in module.parameters())


def test_a_phase_has_its_own_parameters_watched() -> None:
    module = layer()
    run, sums, hooks = run_of(module), ShardedSums(), Hooks("single", SingleStrategy())
    for trained, other in ((module.weight, module.bias), (module.bias, module.weight)):
        trained.requires_grad_(True)
        other.requires_grad_(False)
        sums.watch(run)
        for micro, loss in losses(module):
            sums.add_block(run, hooks, micro, loss, FINEST)
        assert trained.grad is not None
        assert trained.grad.dtype == torch.float64


def test_a_gradient_that_is_no_number_shows() -> None:
    module = layer()
    run, sums = run_of(module), ShardedSums()
    sums.watch(run)
    micro = MicroBatch(np.arange(2), last=True)
    rows = torch.tensor([[1.0] * 5, [math.nan] * 5])
    added = sums.add_block(
        run, Hooks("single", SingleStrategy()), micro, lambda: module(rows).sum(), FINEST
    )
    assert math.isnan(float(added.greatest))
    assert module.weight.grad is not None
    assert module.weight.grad.isnan().all()
