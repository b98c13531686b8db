"""The norm that clips: right for a gradient of any size, and the same over any number of shards."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor, nn

from distcore import Clip, defaults, gradient_norm

SHAPE = (30522, 768)
"""The embedding of a BERT of base size: 23 million elements."""


@pytest.fixture(scope="module")
def large() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def true_norm(large: Tensor) -> float:
    squares = (float(piece.double().square().sum()) for piece in large.flatten().split(2**12))
    return math.sqrt(math.fsum(squares))


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def clipped(gradients: list[Tensor], limit: float) -> float:
    parameters = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = defaults.clip_gradients(torch.optim.SGD(parameters), Clip(norm=limit))
    assert norm is not None
    assert norm.dtype == torch.float32
    return float(norm)


def test_the_norm_that_clips_is_the_true_one(large: Tensor, true_norm: float) -> None:
    gradient = large.clone()
    assert clipped([gradient], 1.0) == pytest.approx(true_norm, rel=1e-7)
    assert torch.equal(
        gradient, large * (1.0 / (torch.tensor(true_norm, dtype=torch.float32) + 1e-6))
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_shards_of_a_gradient_have_the_norm_of_the_whole(
    large: Tensor, true_norm: float, shards: int
) -> None:
    squares = [gradient_norm.squared_norm([part]) for part in large.tensor_split(shards)]
    norm = torch.stack(squares).sum().sqrt().float()
    assert norm == torch.tensor(true_norm, dtype=torch.float64).float()


def test_an_element_costs_at_most_three_nanoseconds(large: Tensor) -> None:
    times = []
    for _ in range(5):
        begin = time.process_time()
        gradient_norm.total_norm([large])
        times.append(time.process_time() - begin)
    assert min(times) / large.numel() <= 3e-9


def test_small_and_large_tensors_of_any_kind_count_together() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = ((), (0,), (3,), (5, 7), (200, 300), (2**18 + 1,), (40, 1000))
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors += [torch.randn(1000, generator=generator) for _ in range(300)]
    tensors += [
        torch.randn(64, 32, generator=generator).T,
        torch.randn(9, generator=generator).bfloat16(),
    ]
    dense = torch.cat([tensor.double().flatten() for tensor in tensors])
    complex_one = torch.tensor([3 + 4j, 1j])
    rows = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]),
        torch.ones(3, 2),
        (5, 2),
        is_coalesced=False,
        check_invariants=True,
    )
    expected = float((dense.square().sum() + 26 + 2 * 4 + 2).sqrt())
    assert float(gradient_norm.total_norm([*tensors, complex_one, rows])) == pytest.approx(
        expected, rel=1e-7
    )


def test_no_gradient_has_norm_zero_and_no_number_stays_none() -> None:
    assert float(gradient_norm.total_norm([])) == 0
    assert float(gradient_norm.squared_norm([torch.zeros(3)])) == 0
    for bad in (math.nan, math.inf):
        assert not math.isfinite(clipped([torch.tensor([1.0, bad])], 1.0))


def test_sparse_gradients_are_clipped_too() -> None:
    rows = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]),
        torch.tensor([[3.0], [4.0]]),
        (3, 1),
        is_coalesced=False,
        check_invariants=True,
    )
    assert clipped([rows], 0.5) == 5
    assert torch.allclose(rows.to_dense(), torch.tensor([[0.3], [0.0], [0.4]]))


def test_a_norm_that_is_small_enough_changes_nothing() -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.zeros(2, 2)]
    assert clipped(gradients, 5.1) == 5
    assert gradients[0].tolist() == [3, 4]
