"""Refuse random collation: the values would differ after a resume, or on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcore.engine.loader import each_tensor
from distcore.errors import TaskError
from distcore.plugin.strategy.contract import MicroBatch
from distcore.plugin.task.task import Batch, Dataset

TRAINED = (
    "no resume could repeat them; what is random belongs into at(epoch), with numbers of"
    " distcore.row_random"
)
"""The consequence of random training rows, with a remedy."""


def check_collation(
    dataset: Dataset, batches: list[tuple[MicroBatch, Batch]], workers: int, advice: str = TRAINED
) -> None:
    """Collate these micro-batches again; raise TaskError at the first different value.

    ``workers`` is the number of loader processes that collated them; 0: this process did.
    ``advice`` ends the message.
    """
    for micro, batch in batches:
        # A loader process begins with a copy of the dataset and of its generator, so the first
        # collation here draws the same numbers as the loader's; only the second one shows that they
        # change.
        again = [dataset.batch(micro.indices) for _ in range(2 if workers else 1)]
        if place := difference(each_tensor(batch, Tensor.cpu), again[-1]):
            raise TaskError(
                f"dataset: batch() gives other values for the same rows each time (at {place}), so"
                f" {advice}"
            )


def difference(one: Any, other: Any, place: str = "batch") -> str | None:
    """Return where two batches differ, such as ``batch['tokens'][0]``; ``None`` if nowhere.

    They are compared bit for bit.

    Tuples and lists count as the same; an object of an unknown kind is compared by its attributes.
    """
    if one is other:
        return None
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return None if _equal_tensors(one, other) else place
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        can_have_nan = one.dtype.kind in "fc"
        are_equal = one.dtype == other.dtype and np.array_equal(one, other, equal_nan=can_have_nan)
        return None if are_equal else place
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if list(one) != list(other):
            return place
        for name in one:
            if inner := difference(one[name], other[name], f"{place}[{name!r}]"):
                return inner
        return None
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return place
        for index, pair in enumerate(zip(one, other, strict=True)):
            if inner := difference(*pair, f"{place}[{index}]"):
                return inner
        return None
    if type(one) is not type(other):
        return place
    if hasattr(one, "__dict__"):
        return difference(vars(one), vars(other), place)
    return None if one == other or one != one else place  # a NaN is not equal to itself


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape, layout and values; NaN equals NaN."""
    if one.is_nested or other.is_nested:
        if not (one.is_nested and other.is_nested):
            return False
        return difference(one.unbind(), other.unbind()) is None
    form = (one.dtype, one.shape, one.layout)
    if form != (other.dtype, other.shape, other.layout):
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    are_nan = (one != one) & (other != other)
    return bool(((one == other) | are_nan).all())
