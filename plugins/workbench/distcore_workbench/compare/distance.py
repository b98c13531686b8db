"""The distance between the parameters of two checkpoints, and the bits in which they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distcore.checkpoint import Checkpoint, difference

MODEL = "model/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """The difference between the parameters of a checkpoint and of a reference."""

    largest: float
    """Largest absolute difference of two elements."""
    relative: float
    """L2 norm of all differences, divided by the norm of all parameters of the reference."""
    tensor: str
    """Name of the tensor with the largest difference; empty if there is no difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherBits:
    """The elements of a checkpoint's tensors, moments included, with other bits than a
    reference's.
    """

    differing: int
    """Number of elements with other bits; all of a tensor that one of the two lacks."""
    elements: int
    """Number of all elements."""
    tensor: str
    """Name of the tensor with most of them; empty if there is none."""


def distance(path: Path, reference: Path) -> Distance:
    """Compare the models of two checkpoints, one tensor at a time.

    The distance is infinite if names or shapes differ.
    """
    compared = Checkpoint(path)
    expected = Checkpoint(reference)
    names = {name for name in {*compared, *expected} if name.startswith(MODEL)}
    largest = 0.0
    largest_tensor = ""
    squared_difference = 0.0
    squared_norm = 0.0
    for name in sorted(names):
        tensor = name.removeprefix(MODEL)
        if not _has_same_shape(compared, expected, name):
            return Distance(largest=math.inf, relative=math.inf, tensor=tensor)
        values = expected[name].double()
        error = difference(compared[name], values)
        norm = float(values.norm())
        # The difference from a tensor of zeros is absolute: there is no norm to multiply with.
        squared_difference += (error.relative * (norm or 1.0)) ** 2
        squared_norm += norm**2
        if error.largest > largest or math.isnan(error.largest):  # NaN is not greater than anything
            largest = error.largest
            largest_tensor = tensor
    relative = math.sqrt(squared_difference / (squared_norm or 1.0))
    return Distance(largest=largest, relative=relative, tensor=largest_tensor)


def other_bits(path: Path, reference: Path, under: str = "") -> OtherBits:
    """Compare the tensors of two checkpoints bit by bit, one tensor at a time.

    All of them, or those whose names begin with ``under``.
    """
    compared = Checkpoint(path)
    expected = Checkpoint(reference)
    differing: dict[str, int] = {}
    elements = 0
    names = {name for name in {*compared, *expected} if name.startswith(under)}
    for name in sorted(names):
        either = expected if name in expected else compared
        count = math.prod(either.entry(name).shape)
        elements += count
        differing[name] = count
        if _has_same_shape(compared, expected, name):
            differing[name] = _count_other_bits(compared[name], expected[name])
    worst = max(differing, key=lambda name: differing[name], default="")
    total = sum(differing.values())
    return OtherBits(differing=total, elements=elements, tensor=worst if total else "")


def _count_other_bits(one: Tensor, other: Tensor) -> int:
    """Return how many elements of two tensors of one shape differ in any bit."""
    if one.dtype != other.dtype:
        return one.numel()
    # Not by ``!=``: it takes 0 for -0, and no NaN for another one.
    bytes_of_one, bytes_of_other = (
        tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.element_size())
        for tensor in (one, other)
    )
    return int((bytes_of_one != bytes_of_other).any(1).sum())


def _has_same_shape(one: Checkpoint, other: Checkpoint, name: str) -> bool:
    """Return True if both checkpoints have the tensor, in one shape; reads no values."""
    if name not in one or name not in other:
        return False
    return one.entry(name).shape == other.entry(name).shape
