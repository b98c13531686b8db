"""Checkpoints of what an optimizer steps in flat buffers: each rank's runs of elements, by neutral name.

A sharding backend keeps fp32 weights and optimizer state in buffers of its own, and a rank's share of a parameter is
a run of elements in one of them. A strategy tells where they lie, as ``Part``; this page reads and writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distcore.plugin.contract import Piece, SavedState, State

STEP = "step"


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank keeps of one trained parameter: ``count`` elements, maybe none, of a buffer that is optimized."""

    name: str
    """The parameter's, as the task's model has it."""
    master: Tensor
    """The tensor that the optimizer steps; its key in the optimizer's state."""
    offset: int
    """Index in ``master`` of the first element."""
    start: int
    """Index in the flattened parameter of the same element."""
    count: int
    shape: tuple[int, ...]
    """Of the whole parameter."""
    whole: bool
    """True if every rank keeps all of it."""

    def of(self, buffer: Tensor) -> Tensor:
        """The part's elements of ``buffer``, which is laid out as ``master`` is; a view."""
        return buffer.detach().reshape(-1).narrow(0, self.offset, self.count)

    def held(self, buffer: Tensor) -> Tensor | Piece:
        """The same for a checkpoint."""
        values = self.of(buffer)
        return values.view(self.shape) if self.whole else Piece(values, self.start, self.shape)


def save(parts: Iterable[Part], optimizer: Optimizer | None) -> State:
    """Return weights and optimizer state of ``parts``."""
    state: State = {}
    for part in parts:
        kept = _kept(optimizer, part.master)
        if STEP in kept:
            state[f"optimizer/{part.name}/{STEP}"] = torch.as_tensor(float(kept.pop(STEP)))
        if part.count:
            state[f"model/{part.name}"] = part.held(part.master)
            state |= {f"optimizer/{part.name}/{key}": part.held(value) for key, value in kept.items()}
    return state


@torch.no_grad()
def load(parts: Iterable[Part], optimizer: Optimizer | None, saved: SavedState) -> None:
    """Put the saved weights into the buffers, and the saved state, if there is any, into the optimizer."""
    parts = list(parts)
    for part in parts:
        if part.count:
            part.of(part.master).copy_(saved.piece(f"model/{part.name}", part.start, part.count))
    names = {name for name in saved if name.startswith("optimizer/")}
    if optimizer is not None and names:
        for group in _by_buffer(parts):
            _load_state(optimizer, group, saved, names)


@torch.no_grad()
def copy_weights(parts: Iterable[Part], weights: Mapping[str, Tensor]) -> None:
    """Give the buffers these whole weights, by name: where a backend made them from weights in 16 bits."""
    for part in parts:
        part.of(part.master).copy_(weights[part.name].reshape(-1).narrow(0, part.start, part.count))


def _by_buffer(parts: Iterable[Part]) -> Iterable[list[Part]]:
    groups: dict[int, list[Part]] = {}
    for part in parts:
        groups.setdefault(id(part.master), []).append(part)
    return groups.values()


def _kept(optimizer: Optimizer | None, master: Tensor) -> dict[str, Any]:
    """The optimizer's state of one buffer: tensors of its shape, and the step count."""
    state = optimizer.state.get(master, {}) if optimizer is not None else {}
    return {key: value for key, value in state.items() if key == STEP or getattr(value, "shape", None) == master.shape}


def _load_state(optimizer: Optimizer, parts: list[Part], saved: SavedState, names: set[str]) -> None:
    master = parts[0].master
    keys = {key for part in parts for key in _keys(names, part.name)} - {STEP}
    if not keys:
        return
    state: dict[str, Any] = {key: torch.zeros_like(master) for key in keys}
    for part in parts:
        for key in keys:
            if part.count and (name := f"optimizer/{part.name}/{key}") in names:
                part.of(state[key]).copy_(saved.piece(name, part.start, part.count))
    counts = (f"optimizer/{part.name}/{STEP}" for part in parts)
    # One buffer has one count; a parameter that took no part in some steps has a smaller one of its own.
    count = max((float(saved[name]) for name in counts if name in names), default=0.0)
    optimizer.state[master] = state | {STEP: _step(optimizer, master, count)}


def _keys(names: set[str], parameter: str) -> Iterator[str]:
    prefix = f"optimizer/{parameter}/"
    return (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _step(optimizer: Optimizer, master: Tensor, count: float) -> Tensor | int:
    """A step count as the optimizer keeps it: a tensor in torch's own, an int in most others."""
    if not type(optimizer).__module__.startswith("torch."):
        return int(count)
    group = optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(count, device=master.device if on_device else "cpu")
