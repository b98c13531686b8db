"""A part of a tensor is drawn as it is when all of it is drawn, and leaves the same numbers
to those behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distcore.model.deferred_init.partial_init import BLOCK, _is_the_same, draw, drawn_by
from distcore.model.deferred_init.recording import Operation, record

LARGE = 5 * BLOCK
Init = Callable[[Tensor], object]


def recorded(init: Init, size: tuple[int, ...], dtype: torch.dtype) -> Operation:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        init(module.weight)
        return module

    recording, _, _ = record(build)
    [operation] = [operation for operation in recording.operations if operation.is_random]
    return operation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(5,), (40, 3), (LARGE,), (LARGE // 5 + 3, 5)])
@pytest.mark.parametrize(
    "init",
    [lambda t: nn.init.normal_(t, 1.0, 0.02), lambda t: nn.init.uniform_(t, -0.1, 0.3)],
    ids=["normal", "uniform"],
)
def test_a_part_has_the_values_of_the_whole_and_moves_the_generator_as_far(
    init: Init, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    operation, count = recorded(init, size, dtype), torch.Size(size).numel()
    assert drawn_by(operation) is not None
    torch.manual_seed(1)
    whole = torch.empty(size, dtype=dtype)
    init(whole)
    after = torch.get_rng_state()
    for start, stop in (
        (0, count),
        (0, 0),
        (0, count // 3),
        (count // 3 + 1, count - 2),
        (count - 1, count),
    ):
        torch.manual_seed(1)
        part = draw(operation, start, stop - start)
        assert torch.equal(part, whole.flatten()[start:stop])
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("passes_over", [False, True])
def test_a_draw_that_goes_another_way_is_noticed(passes_over: bool) -> None:
    state = torch.get_rng_state()
    assert _is_the_same(torch.ops.aten.normal_.default, torch.float32, passes_over)
    assert not _is_the_same(
        lambda tensor: tensor.copy_(torch.rand(len(tensor)).flip(0)), torch.float32, passes_over
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_two_raw_numbers_for_an_element_are_noticed() -> None:
    assert not _is_the_same(torch.ops.aten.normal_.default, torch.float64, passes_over=True)


def test_a_part_of_a_storage_is_not_taken_for_all_of_it() -> None:
    def init(weight: Tensor) -> None:
        nn.init.normal_(weight.detach()[2:])

    assert drawn_by(recorded(init, (5, 3), torch.float32)) is None
