"""Checkpoints for backends that keep parameters in flat buffers.

Such a backend flattens parameters, joins them into a long one-dimensional fp32 buffer, and gives each rank a slice of
it, which the optimizer steps. So a rank holds consecutive elements of some parameters: all, some or none of each. A
strategy describes them as ``Part``; ``save`` and ``load`` translate between buffers and named tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcore.plugin.state import Piece, SavedState, State

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
        """Return the elements in ``buffer``, which has the layout of ``master``: a view, shape ``(count,)``."""
        return buffer.detach().reshape(-1).narrow(0, self.offset, self.count)

    def saved_value(self, buffer: Tensor) -> Tensor | Piece:
        """Return the elements in ``buffer`` as a checkpoint takes them."""
        values = self.slice_of(buffer)
        return values.view(self.shape) if self.whole else Piece(values, self.start, self.shape)


def save(parts: Iterable[Part], optimizer: Optimizer | None) -> State:
    """Return the weights and the optimizer state of ``parts``; with ``optimizer=None`` only weights."""
    state: State = {}
    for part in parts:
        kept = _state_of(optimizer, part.master)
        if STEP in kept:
            state[f"optimizer/{part.name}/{STEP}"] = torch.as_tensor(float(kept.pop(STEP)))
        if part.count:
            state[f"model/{part.name}"] = part.saved_value(part.master)
            state |= {f"optimizer/{part.name}/{key}": part.saved_value(value) for key, value in kept.items()}
    return state


@torch.no_grad()
def load(parts: Iterable[Part], optimizer: Optimizer | None, saved: SavedState) -> None:
    """Copy the saved weights into the buffers, and the saved state, if there is any, into the optimizer."""
    parts = list(parts)
    for part in parts:
        if part.count:
            part.slice_of(part.master).copy_(saved.piece(f"model/{part.name}", part.start, part.count))
    names = {name for name in saved if name.startswith("optimizer/")}
    if optimizer is not None and names:
        for group in _by_buffer(parts):
            _load_state(optimizer, group, saved, names)


@torch.no_grad()
def copy_weights(parts: Iterable[Part], weights: Mapping[str, Tensor]) -> None:
    """Copy whole weights, by parameter name, into the buffers.

    For a backend that fills its fp32 buffers from a 16-bit model and would lose precision.
    """
    for part in parts:
        part.slice_of(part.master).copy_(weights[part.name].reshape(-1).narrow(0, part.start, part.count))


def _by_buffer(parts: Iterable[Part]) -> Iterable[list[Part]]:
    groups: dict[int, list[Part]] = {}
    for part in parts:
        groups.setdefault(id(part.master), []).append(part)
    return groups.values()


def _state_of(optimizer: Optimizer | None, master: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of one buffer: the tensors of its shape, and the step count."""
    state = optimizer.state.get(master, {}) if optimizer is not None else {}
    return {key: value for key, value in state.items() if key == STEP or getattr(value, "shape", None) == master.shape}


def _load_state(optimizer: Optimizer, parts: list[Part], saved: SavedState, names: set[str]) -> None:
    master = parts[0].master
    keys = {key for part in parts for key in _keys(names, part.name)} - {STEP}
    if not keys:
        return
    # Zeros stay where nothing was saved: for a parameter that never had a gradient, and for alignment padding.
    state: dict[str, Any] = {key: torch.zeros_like(master) for key in keys}
    for part in parts:
        for key in keys:
            if part.count and (name := f"optimizer/{part.name}/{key}") in names:
                part.slice_of(state[key]).copy_(saved.piece(name, part.start, part.count))
    counts = (f"optimizer/{part.name}/{STEP}" for part in parts)
    # A buffer has one step count. Saved counts may differ: a parameter without a gradient in some steps has fewer.
    count = max((float(saved[name]) for name in counts if name in names), default=0.0)
    optimizer.state[master] = state | {STEP: _step(optimizer, master, count)}


def _keys(names: set[str], parameter: str) -> Iterator[str]:
    prefix = f"optimizer/{parameter}/"
    return (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _step(optimizer: Optimizer, master: Tensor, count: float) -> Tensor | int:
    """Return a step count in the optimizer's own form: torch keeps a tensor, most others an int."""
    if not type(optimizer).__module__.startswith("torch."):
        return int(count)
    group = optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(count, device=master.device if on_device else "cpu")
