"""Modules of one's own under stage 3: what it cannot partition is built whole,
or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distcore import MetaModelError, ModelError, TaskError
from distcore_deepspeed import build_engine, engine
from distcore_deepspeed.deferred_partitions import replay


def test_a_layer_with_weak_references_to_its_weights_is_built_whole() -> None:
    def source(model: nn.Module) -> Any:
        return SimpleNamespace(replay=lambda: (model, None))

    plain = nn.Linear(2, 2)
    assert replay(source(plain))[0] is plain
    with pytest.raises(
        MetaModelError, match=r"the layer of 0\.weight_ih_l0 keeps a weak reference to it"
    ):
        replay(source(nn.Sequential(nn.GRU(2, 2))))


def two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))


def compiled() -> nn.Module:
    layer: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            two_dtypes,
            r"'0.weight' \(torch.float32\) and '1.weight' \(torch.float64\) have two dtypes",
        ),
        (
            compiled,
            (
                r"the model's '0' is a result of torch.compile\(\), .*: compile it in place by"
                r" 0.compile\(\)"
            ),
        ),
    ],
)
def test_a_module_that_stage_3_cannot_partition_is_refused_by_name(
    build: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        build_engine._refuse_unsharded(build())
    frozen = two_dtypes()
    frozen[1].requires_grad_(False)  # type: ignore[index]
    build_engine._refuse_unsharded(frozen)


def test_a_module_that_is_called_inside_of_torch_func_is_refused_at_stage_3() -> None:
    """DeepSpeed's function for linear layers ends the process there."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    build_engine.refuse_transforms(net)
    rows = torch.randn(2, 4)
    assert net(rows).shape == (2, 4)
    for transform in (torch.func.grad(lambda x: net(x).sum()), torch.func.vmap(net)):
        with pytest.raises(TaskError, match=r"calls '0' inside of torch.func .*stage=2"):
            transform(rows)


def test_ranks_are_compared_at_modules_with_weights_unless_some_are_leaves() -> None:
    from deepspeed.utils import set_z3_leaf_modules

    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))
    run: Any = SimpleNamespace(module=net, capabilities=SimpleNamespace(shards_parameters=True))
    assert list(engine.gathering_modules(run)) == ["", "0", "2.0"]
    run.capabilities.shards_parameters = False
    assert not engine.gathering_modules(run)
    run.capabilities.shards_parameters = True
    set_z3_leaf_modules(net[2], [nn.Sequential])
    assert not engine.gathering_modules(run)
