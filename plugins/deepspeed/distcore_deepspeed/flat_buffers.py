"""Checkpoints for backends that keep parameters in flat buffers.

Such a backend flattens parameters, joins them into a long one-dimensional fp32 buffer, and gives
each rank a slice of it, which the optimizer steps. So a rank holds consecutive elements of some
parameters: all, some or none of each. A strategy describes them as ``Part``; ``save`` and ``load``
translate between buffers and named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcore import Piece, SavedState, State

STEP = "step"
"""Key of the step count in an optimizer's state."""


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of one trained parameter that this rank holds in a flat buffer."""

    name: str
    """Name of the parameter in the task's model."""
    master: Tensor
    """The buffer: the tensor that the optimizer steps, and its key in the optimizer's state."""
    offset: int
    """Index in ``master`` of the first element."""
    start: int
    """Index of the same element in the flattened parameter."""
    count: int
    """Number of elements; may be 0."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    whole: bool
    """True if every rank holds all elements."""

    def slice_of(self, buffer: Tensor) -> Tensor:
        """Return a view of the elements in ``buffer``, shape ``(count,)``.

        ``buffer`` has the layout of ``master``.
        """
        return buffer.detach().reshape(-1).narrow(0, self.offset, self.count)

    def saved_value(self, buffer: Tensor) -> Tensor | Piece:
        """Return the elements in ``buffer`` as a checkpoint takes them."""
        values = self.slice_of(buffer)
        if self.whole:
            return values.view(self.shape)
        return Piece(values, self.start, self.shape)


def save(parts: Iterable[Part], optimizer: Optimizer | None) -> State:
    """Return the weights and optimizer state of ``parts``; without an optimizer only weights."""
    state: State = {}
    for part in parts:
        entries = optimizer.state.get(part.master, {}) if optimizer is not None else {}
        for key, value in entries.items():
            if _is_count(value):
                state[f"optimizer/{part.name}/{key}"] = torch.as_tensor(float(value))
        if not part.count:
            continue
        state[f"model/{part.name}"] = part.saved_value(part.master)
        for key, value in entries.items():
            is_moment = getattr(value, "shape", None) == part.master.shape
            if is_moment:
                state[f"optimizer/{part.name}/{key}"] = part.saved_value(value)
    return state


@torch.no_grad()
def load(
    parts: Iterable[Part],
    optimizer: Optimizer | None,
    saved: SavedState,
    count: Callable[[float], Any] | None = None,
) -> None:
    """Copy saved weights into the buffers, and saved state, if any, into the optimizer.

    ``count`` converts a saved step count to the optimizer's type, such as ``int``; default: a
    tensor, as in torch's optimizers.
    """
    parts = list(parts)
    for part in parts:
        if part.count:
            # Without a name, which would keep the values while the next ones are read.
            part.slice_of(part.master).copy_(
                saved.piece(f"model/{part.name}", part.start, part.count)
            )
    names = {name for name in saved if name.startswith("optimizer/")}
    if optimizer is not None and names:
        for group in _by_buffer(parts):
            convert = count or partial(_as_tensor, optimizer, group[0].master)
            _load_state(optimizer, group, saved, names, convert)


@torch.no_grad()
def copy_weights(parts: Iterable[Part], weights: Mapping[str, Tensor]) -> None:
    """Copy weights, by parameter name, into the buffers. A weight is whole, or just its part.

    For a backend that fills its fp32 buffers from a 16-bit model and would lose precision.
    """
    for part in parts:
        values = weights[part.name].reshape(-1)
        if len(values) != part.count:
            values = values.narrow(0, part.start, part.count)
        part.slice_of(part.master).copy_(values)


def _by_buffer(parts: Iterable[Part]) -> Iterable[list[Part]]:
    """Return the parts of each buffer."""
    groups: dict[int, list[Part]] = {}
    for part in parts:
        groups.setdefault(id(part.master), []).append(part)
    return groups.values()


def _is_count(value: object) -> bool:
    """Return True for a number, such as a step count: a buffer has one for all its parts."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float)


def _load_state(
    optimizer: Optimizer,
    parts: list[Part],
    saved: SavedState,
    names: set[str],
    count: Callable[[float], Any],
) -> None:
    master = parts[0].master
    state: dict[str, Any] = {}
    counts: dict[str, float] = {}
    for part in parts:
        for key in _keys(names, part.name):
            name = f"optimizer/{part.name}/{key}"
            if saved.shape(name) == part.shape and key != STEP:
                # Zeros stay where nothing was saved: for a parameter that never had a gradient,
                # and for padding.
                if key not in state:
                    state[key] = torch.zeros_like(master)
                if part.count:
                    piece = saved.piece(name, part.start, part.count)
                    part.slice_of(state[key]).copy_(piece)
            else:
                # A buffer has one count. Saved ones may differ: a parameter without a gradient in
                # some steps has fewer.
                counts[key] = max(float(saved[name]), counts.get(key, 0.0))
    if not state:
        return
    for key, value in counts.items():
        state[key] = count(value)
    optimizer.state[master] = state


def _keys(names: set[str], parameter: str) -> Iterator[str]:
    """Yield the keys of a parameter's saved state."""
    prefix = f"optimizer/{parameter}/"
    return (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _as_tensor(optimizer: Optimizer, master: Tensor, count: float) -> Tensor:
    """Return a step count as torch's optimizers keep it."""
    group = optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(count, device=master.device if on_device else "cpu")
