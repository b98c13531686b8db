"""Units that torch shards: memory that is not consecutive is made so, and two dtypes in one
are refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distcore import ModelError, dtensors


class Unit(nn.Sequential):
    """A module that torch has sharded, as far as its methods tell."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Do nothing."""


def layer(dtype: torch.dtype) -> nn.Module:
    return nn.Linear(2, 2, dtype=dtype)


def test_parameters_get_consecutive_memory_and_keep_their_values() -> None:
    convolution: Any = nn.Conv2d(3, 4, 3)
    convolution.to(memory_format=torch.channels_last)
    before = convolution.weight.detach().clone()
    assert not convolution.weight.is_contiguous()
    dtensors.make_contiguous(convolution)
    assert convolution.weight.is_contiguous()
    assert torch.equal(convolution.weight, before)


def test_two_dtypes_in_one_unit_are_refused_by_name() -> None:
    says = (
        r"'1.weight' \(torch.float32\) and '2.weight' \(torch.float64\) are sharded together,"
        r" .*strategy_options"
    )
    inner = Unit(layer(torch.bfloat16))
    with pytest.raises(ModelError, match=says):
        dtensors.refuse_mixed_dtypes(Unit(inner, layer(torch.float32), layer(torch.float64)))
    dtensors.refuse_mixed_dtypes(Unit(inner, layer(torch.float32)))
    frozen = Unit(layer(torch.float32), layer(torch.float64).requires_grad_(False))
    dtensors.refuse_mixed_dtypes(frozen)
