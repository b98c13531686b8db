"""Running statistics count each batch once, also where it is recomputed; those
of frozen parts stay.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore import RunConfig
from distcore.model.optim import freeze
from distcore.model.running_statistics import FrozenStatistics, count_each_batch_once

STEPS = 3


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, **how: Any) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, rows, **self.how) if self.how else self.inner(rows)
        return result


class Activated(nn.BatchNorm1d):
    """A layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def trained(norm: nn.Module, **how: Any) -> dict[str, Tensor]:
    """Train a little net, and return its state."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 4), Recomputed(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4)), **how)
    )
    count_each_batch_once(net)
    net = deepcopy(net)  # as some strategies do
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "make",
    [nn.BatchNorm1d, Activated, partial(nn.BatchNorm1d, affine=False, momentum=None)],
    ids=str,
)
def test_a_recomputed_batch_counts_once(make: Any, use_reentrant: bool) -> None:
    once, again = trained(make(4)), trained(make(4), use_reentrant=use_reentrant)
    assert int(once["1.inner.1.num_batches_tracked"]) == STEPS
    assert all(torch.equal(again[name], value) for name, value in once.items())


def test_a_batch_counts_once_where_a_recomputation_ends_early_and_where_it_does_not() -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    once = trained(nn.BatchNorm1d(4))
    for early in (True, False):
        with set_checkpoint_early_stop(early):
            again = trained(nn.BatchNorm1d(4), use_reentrant=False)
        assert all(torch.equal(again[name], value) for name, value in once.items())


def net() -> nn.Sequential:
    """A body with normalizations with and without weights of their own, and a head with one."""
    body = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True)
    )
    head = nn.Sequential(nn.Flatten(), nn.Linear(18, 4), nn.BatchNorm1d(4))
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", head)
    return model


def moved(model: nn.Module) -> list[str]:
    """Train on some images, and return the names of the buffers that are not what they were."""
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.train()
    model(torch.randn(4, 1, 5, 5))
    return [name for name, value in model.named_buffers() if not torch.equal(value, before[name])]


def test_statistics_of_a_frozen_part_stay_and_normalize() -> None:
    model = net()
    freeze(RunConfig(freeze="^body"), model)
    assert moved(model) == [
        "head.2.running_mean",
        "head.2.running_var",
        "head.2.num_batches_tracked",
    ]
    alone, two = model.body(torch.ones(1, 1, 5, 5)), model.body(torch.ones(2, 1, 5, 5))  # type: ignore[operator]
    torch.testing.assert_close(two[:1], alone)
    assert [isinstance(part, FrozenStatistics) for part in (model.body[1], model.head[2])] == [  # type: ignore[index]
        True,
        False,
    ]


def test_statistics_stay_in_a_part_that_the_task_froze_and_move_where_anything_is_trained() -> None:
    model = net()
    # the layers behind it have weights that are trained
    model.get_submodule("body.0").requires_grad_(False)
    freeze(RunConfig(), model)
    assert "body.1.running_mean" in moved(model)
    model.get_submodule("body").requires_grad_(False)
    freeze(RunConfig(), model)
    assert not [name for name in moved(model) if name.startswith("body")]


@pytest.mark.parametrize("lora", [{}, {"rank": 2}])
def test_a_layer_that_a_task_put_into_evaluation_mode_stays_in_it(lora: dict[str, Any]) -> None:
    model = net()
    model.get_submodule("body.1").eval()
    freeze(RunConfig(lora=lora), model)
    names = moved(model)
    assert "head.2.running_mean" in names
    assert not [name for name in names if name.startswith("body.1.")]
    whole = net().eval()  # as from_pretrained() returns it
    freeze(RunConfig(lora=lora), whole)
    assert "body.1.running_mean" in moved(whole)


def test_beside_lora_they_go_on() -> None:
    model = net().requires_grad_(False)
    freeze(RunConfig(lora={"rank": 2}), model)
    assert "body.1.running_mean" in moved(model)
