"""A fused Adam steps an element to the same bits, wherever its tensor is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from distcore import RunConfig
from distcore.model.optim import optimizer_factory
from distcore.model.optimizers.vector_ends import MOMENTS

ELEMENTS = 3_001
STEPS = 5
RANDOM = torch.Generator().manual_seed(0)
WEIGHTS = torch.randn(ELEMENTS, generator=RANDOM)
GRADIENTS = torch.randn(STEPS, ELEMENTS, generator=RANDOM) * 10 ** (
    6 * torch.rand(STEPS, ELEMENTS, generator=RANDOM) - 7
)
CUTS = [[0, ELEMENTS]] + [
    [0, *sorted(torch.randperm(ELEMENTS - 1, generator=RANDOM)[:40].add(1).tolist()), ELEMENTS]
    for _ in range(4)
]
"""The whole tensor, and ways to cut it into 41 tensors."""


def optimizer_of(module: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    config = RunConfig.model_validate({"optimizer": {"name": name}, "lr": 1e-3, "exact": 1})
    optimizer = optimizer_factory(config)(module)
    assert optimizer.defaults["fused"]
    return optimizer


def stepped(name: str, cut: list[int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return weights and moments after some steps; gradients of the first tensor begin late."""
    parts = [nn.Parameter(WEIGHTS[a:b].to(dtype, copy=True)) for a, b in pairwise(cut)]
    optimizer = optimizer_of(nn.ParameterList(parts), name)
    for gradients in GRADIENTS:
        for parameter, (first, stop) in zip(parts, pairwise(cut), strict=True):
            parameter.grad = gradients[first:stop].to(dtype, copy=True)
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[each] for each in parts]
    tensors = {name: torch.cat([state[name] for state in states]) for name in MOMENTS}
    return tensors | {"weights": torch.cat([each.detach() for each in parts])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_parts_of_a_tensor_are_stepped_as_the_whole(name: str, dtype: torch.dtype) -> None:
    whole, *cut = [stepped(name, each, dtype) for each in CUTS]
    for parts in cut:
        assert {key: int((parts[key] != whole[key]).sum()) for key in whole} == dict.fromkeys(
            whole, 0
        )


def test_tensors_that_have_taken_fewer_steps_keep_their_own_number() -> None:
    late, early = nn.Parameter(WEIGHTS[:90].clone()), nn.Parameter(WEIGHTS[90:175].clone())
    twins = [nn.Parameter(each.detach().clone()) for each in (late, early)]
    optimizer = optimizer_of(nn.ParameterList([late, early]))
    plain = torch.optim.AdamW(twins, lr=1e-3, foreach=False)
    for step, gradient in enumerate(GRADIENTS):
        for parameters, each in (((late, early), optimizer), (twins, plain)):
            parameters[0].grad = gradient[:90].clone() if step >= 2 else None
            parameters[1].grad = gradient[90:175].clone()
            each.step()
    assert [float(optimizer.state[each]["step"]) for each in (late, early)] == [3.0, 5.0]
    for parameter, twin in zip((late, early), twins, strict=True):
        torch.testing.assert_close(parameter, twin, rtol=1e-6, atol=1e-7)


def test_a_step_that_overflowed_changes_nothing() -> None:
    parameter = nn.Parameter(WEIGHTS[:70].clone())
    optimizer = optimizer_of(nn.ParameterList([parameter]))
    parameter.grad = GRADIENTS[0, :70].clone()
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(parameter, WEIGHTS[:70])
    assert float(optimizer.state[parameter]["exp_avg"].abs().sum()) == 0.0


def test_weights_that_are_moved_or_replaced_are_stepped_where_they_are() -> None:
    parameter, twin = (nn.Parameter(WEIGHTS[:70].clone()) for _ in "ab")
    optimizer = optimizer_of(nn.ParameterList([parameter]))
    plain = torch.optim.AdamW([twin], lr=1e-3, foreach=False)
    for gradient in GRADIENTS:
        for each, which in ((parameter, optimizer), (twin, plain)):
            each.grad = gradient[:70].clone()
            which.step()
        parameter.data = parameter.data.clone()
        optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(parameter, twin, rtol=1e-6, atol=1e-7)
