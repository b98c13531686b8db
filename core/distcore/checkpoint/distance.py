"""How far two tensors, and the parameters of two checkpoints, are from each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from distcore.checkpoint.reader import Checkpoint

MODEL = "model/"


class Difference(NamedTuple):
    """Between two tensors; infinite where their shapes differ."""

    largest: float
    """The largest absolute difference of an element."""
    relative: float
    """The L2 norm of the differences over that of the expected tensor, or over 1 where that is zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """Between two models: the largest difference of an element, and the L2 norm of all differences."""

    largest: float
    relative: float
    """The norm of the differences over the norm of the reference, all parameters together."""
    tensor: str
    """Where the largest difference is; empty if there is none."""


def difference(found: Tensor, expected: Tensor) -> Difference:
    """Compare in float64 on the CPU; any shapes and dtypes."""
    if found.shape != expected.shape:
        return Difference(math.inf, math.inf)
    expected = expected.detach().cpu().double()
    apart = found.detach().cpu().double() - expected
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    return Difference(largest, float(apart.norm()) / (float(expected.norm()) or 1.0))


def distance(path: Path, reference: Path) -> Distance:
    """Read two checkpoints tensor by tensor; infinite where they do not hold the same tensors."""
    one, other = Checkpoint(path), Checkpoint(reference)
    names = {name for name in {*one, *other} if name.startswith(MODEL)}
    largest, where, apart, size = 0.0, "", 0.0, 0.0
    for name in sorted(names):
        if name not in one or name not in other or one.entry(name).shape != other.entry(name).shape:
            return Distance(largest=math.inf, relative=math.inf, tensor=name.removeprefix(MODEL))
        expected = other[name].double()
        found = difference(one[name], expected)
        norm = float(expected.norm())
        apart, size = apart + (found.relative * (norm or 1.0)) ** 2, size + norm**2
        if found.largest > largest or math.isnan(found.largest):
            largest, where = found.largest, name.removeprefix(MODEL)
    return Distance(largest=largest, relative=math.sqrt(apart / (size or 1.0)), tensor=where)


def differing(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[float, str]]:
    """Relative difference, and one line that says it, for each tensor in which ``other`` is not ``one``."""
    for name in sorted(set(one) | set(other)):
        if name not in one or name not in other:
            yield math.inf, f"{name}  only in {(one if name in one else other).path}"
            continue
        a, b = one[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield math.inf, f"{name}  {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"
        elif not torch.equal(a, b):
            found = difference(b, a)
            yield found.relative, f"{name}  largest difference {found.largest:.3g}, relative {found.relative:.3g}"
