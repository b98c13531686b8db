"""A step without values holds as many bytes as the same step with values."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from distcore_workbench.planning.storages import Storages
from distcore_workbench.planning.workspace import workspace


def most_of(storages: Storages) -> int:
    return max(accumulate(change for _, change in storages.changes))


def test_a_second_gradient_is_added_to_the_first_in_place() -> None:
    size, storages = 4 * 10**6, Storages()
    with storages.tracing():
        weight = nn.Parameter(torch.empty(10**6))
        storages.count([weight])
        (weight * 2).sum().add((weight * 3).sum()).backward()
        assert weight.grad is not None
    # the weight and its two gradients, but no sum beside them
    assert 3 * size <= most_of(storages) < 3.01 * size


def test_a_second_gradient_of_a_linear_layer_is_not_added_in_place() -> None:
    """It is a view. A weight that an embedding shares, as GPT-2's, so has two gradients and their
    sum at a time.
    """
    size, storages = 4 * 10**6, Storages()
    with storages.tracing():
        weight = nn.Parameter(torch.empty(10**5, 10))
        storages.count([weight])
        embedded = nn.functional.embedding(torch.tensor([[0, 1]]), weight)
        nn.functional.linear(embedded, weight).sum().backward()
    assert 4 * size <= most_of(storages) < 4.5 * size


def test_the_scratch_of_a_convolution_lives_no_longer_than_it() -> None:
    """The weight, its gradient and what oneDNN reorders; the last is some times the
    weight on every processor.
    """
    storages, without = Storages(threads=1), Storages()
    for one in (storages, without):
        with one.tracing():
            weight = nn.Parameter(torch.empty(256, 3, 16, 16))
            one.count([weight])
            nn.functional.conv2d(torch.empty(4, 3, 128, 128), weight, stride=16).sum().backward()
            left = sum(change for _, change in one.changes)
            del weight
    assert most_of(storages) >= most_of(without) + 256 * 3 * 16 * 16 * 4
    assert left < most_of(storages) / 2


def test_a_mask_with_values_chooses_tokens_of_several_rows() -> None:
    mask, storages = torch.tensor([[True, False, True], [False, False, True]]), Storages()
    with storages.tracing():
        weight = nn.Parameter(torch.empty(2, 3, 5))
        assert weight[mask].shape == (3, 5)
        assert weight[:, mask[0]].shape == (2, 2, 5)
        weight[mask].sum().backward()


def test_the_scratch_of_a_convolutions_gradient_grows_with_threads() -> None:
    images, weight, gradient = (
        torch.empty(4, 3, 128, 128),
        torch.empty(256, 3, 16, 16),
        torch.empty(4, 256, 8, 8),
    )
    given = [
        gradient,
        images,
        weight,
        [256],
        [16, 16],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [False, True, True],
    ]
    kernel = torch.ops.aten.convolution_backward.default
    one, two = (workspace(kernel, given, threads) for threads in (1, 2))
    assert weight.nbytes < one < two
    assert workspace(torch.ops.aten.mm.default, [gradient, gradient], 1) == 0


def test_a_convolution_that_cannot_be_run_counts_nothing_beside_its_results() -> None:
    with FakeTensorMode():
        images, weight = torch.empty(2**16, 3, 128, 128), torch.empty(8, 3, 3, 3)
    kernel, rest = torch.ops.aten.convolution.default, ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert workspace(kernel, (images, weight, None, *rest), 1) == 0  # 12 GiB
    assert workspace(kernel, (images[:1], weight[:, :2], None, *rest), 1) == 0  # torch refuses it
