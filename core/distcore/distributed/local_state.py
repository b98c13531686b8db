"""Load from the ranks' memory: a rank reads its own parts, all together gather a whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from distcore.errors import StrategyError
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.strategy.state import Box, Piece, State

Part = Tensor | Piece | Box


def parts_of(held: Part | Sequence[Box]) -> Sequence[Part]:
    """Return the parts of one entry of a ``State``."""
    return [held] if isinstance(held, Tensor | Piece | Box) else held


def values_of(held: Part | Sequence[Box]) -> list[Tensor]:
    """Return the elements of each part of one entry of a ``State``."""
    return [part if isinstance(part, Tensor) else part.values for part in parts_of(held)]


class LocalState:
    """The state in the memory of the ranks; implements ``distcore.SavedState``.

    A rank reads its own parts; others raise StrategyError. Reading a whole tensor gathers its
    pieces: every rank must read it, in the same order.
    """

    def __init__(self, run: Run, hooks: Hooks, state: State) -> None:
        """``state`` is this rank's part."""
        self._run = run
        self._hooks = hooks
        self._state = state

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole tensor; in fp32, if it is gathered."""
        held = self._state.get(name)
        return held if isinstance(held, Tensor) else self._gather(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        for part in self._parts(name):
            return tuple(part.shape)
        raise self._refusal(name, "the shape")

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count``, flat: shape ``(count,)``."""
        end = start + count
        for part in self._parts(name):
            if isinstance(part, Tensor):
                return part.reshape(-1)[start:end]
            if not isinstance(part, Piece):
                continue
            part_end = part.start + len(part.values)
            if part.start <= start and end <= part_end:
                return part.values[start - part.start : end - part.start]
        raise self._refusal(name, f"elements {start} to {start + count}")

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements of the tensor from index ``offset`` on, in each dimension."""
        for part in self._parts(name):
            if isinstance(part, Tensor):
                return part[_slices(offset, size, [0] * len(size))]
            if not isinstance(part, Box):
                continue
            ranges = zip(part.offset, part.values.shape, offset, size, strict=True)
            is_inside = all(
                start <= first and first + count <= start + length
                for start, length, first, count in ranges
            )
            if is_inside:
                return part.values[_slices(offset, size, part.offset)]
        raise self._refusal(name, f"{list(size)} at {list(offset)}")

    def _parts(self, name: str) -> Sequence[Part]:
        return parts_of(self._state[name]) if name in self._state else []

    def _gather(self, name: str) -> Tensor:
        """Return a whole tensor of fp32 from the pieces of all ranks; every rank calls."""
        device = self._run.world.device
        pieces = [part for part in self._parts(name) if isinstance(part, Piece)]
        pieces = [piece for piece in pieces if not piece.replica]
        values = [piece.values.to(device, torch.float32) for piece in pieces]
        no_values = torch.empty(0, device=device)
        # Just one rank has the first element, so only this one sends the shape.
        shapes = [piece.shape for piece in pieces if piece.start == 0]
        integers = {
            "start": [piece.start for piece in pieces],
            "count": [len(piece.values) for piece in pieces],
            "shape": list(shapes[0]) if shapes else [],
        }
        mine = {"values": torch.cat([no_values, *values])}
        for key, numbers in integers.items():
            mine[key] = torch.tensor(numbers, dtype=torch.long, device=device)
        gathered = self._hooks.gather_outputs(self._run, mine)
        shape = tuple(gathered["shape"].tolist())
        flat = gathered["values"]
        starts = gathered["start"].tolist()
        if len(flat) != prod(shape) or not starts:
            raise self._refusal(name, "all of it")
        parts = torch.split(flat, gathered["count"].tolist())
        whole = torch.empty_like(flat)
        for start, part in zip(starts, parts, strict=True):
            whole[start : start + len(part)] = part
        return whole.view(shape)

    def _refusal(self, name: str, what: str) -> StrategyError:
        """Return the error of a strategy that reads ``what`` it did not save."""
        return StrategyError(
            f"strategy {self._hooks.name!r}: load_checkpoint() asks for {what} of {name!r}, which"
            f" save_checkpoint() did not return on rank {self._run.world.rank}; it cannot"
            " declare ema"
        )


def _slices(offset: Sequence[int], size: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the indices of a box in a tensor that begins at ``origin`` of the whole."""
    slices = []
    for first, count, first_of_tensor in zip(offset, size, origin, strict=True):
        start = first - first_of_tensor
        slices.append(slice(start, start + count))
    return tuple(slices)
