"""Refuse random collation: after a resume, or with another number of ranks,
the values would differ.
"""

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
"""What random training rows lead to, and the way out."""


def check_collation(
    dataset: Dataset, batches: list[tuple[MicroBatch, Batch]], workers: int, advice: str = TRAINED
) -> None:
    """Collate these micro-batches again; raise TaskError, with the place of
    the first different value.

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
    """Return where two batches differ, such as ``batch['tokens'][0]``; ``None`` where they are
    equal, bit for bit.

    Tuples and lists count as the same; an object of an unknown kind is compared by its attributes.
    """
    if one is other:
        return None
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return None if _equal_tensors(one, other) else place
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        equal = one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind in "fc"
        )
        return None if equal else place
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if list(one) != list(other):
            return place
        return _first(difference(one[name], other[name], f"{place}[{name!r}]") for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return place
        return _first(
            difference(*pair, f"{place}[{i}]")
            for i, pair in enumerate(zip(one, other, strict=True))
        )
    if type(one) is not type(other):
        return place
    if hasattr(one, "__dict__"):
        return difference(vars(one), vars(other), place)
    return None if one == other or one != one else place


def _first(places: Any) -> str | None:
    return next(filter(None, places), None)


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.is_nested or other.is_nested:
        return (
            one.is_nested and other.is_nested and difference(one.unbind(), other.unbind()) is None
        )
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return bool(((one == other) | ((one != one) & (other != other))).all())
