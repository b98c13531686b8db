"""Load from the ranks' memory: a rank reads its own parts, and all ranks together
gather a whole tensor.
"""

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
        self._run, self._hooks, self._state = run, hooks, state

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
        """Return elements ``start`` to ``start + count`` of the
        flattened tensor, shape ``(count,)``.
        """
        for part in self._parts(name):
            if isinstance(part, Tensor):
                return part.reshape(-1)[start : start + count]
            if (
                isinstance(part, Piece)
                and part.start <= start
                and start + count <= part.start + len(part.values)
            ):
                return part.values[start - part.start :][:count]
        raise self._refusal(name, f"elements {start} to {start + count}")

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements of the tensor from index ``offset`` on, in each dimension."""
        for part in self._parts(name):
            if isinstance(part, Tensor):
                return part[_slices(offset, size, [0] * len(size))]
            if not isinstance(part, Box):
                continue
            places = zip(offset, size, part.offset, part.values.shape, strict=True)
            if all(a <= o and o + n <= a + m for o, n, a, m in places):
                return part.values[_slices(offset, size, part.offset)]
        raise self._refusal(name, f"{list(size)} at {list(offset)}")

    def _parts(self, name: str) -> Sequence[Part]:
        return parts_of(self._state[name]) if name in self._state else []

    def _gather(self, name: str) -> Tensor:
        device = self._run.world.device
        pieces = [
            part for part in self._parts(name) if isinstance(part, Piece) and not part.replica
        ]
        values = [piece.values.to(device, torch.float32) for piece in pieces]
        first = next((piece.shape for piece in pieces if piece.start == 0), ())
        gathered = self._hooks.gather_outputs(
            self._run,
            {
                "values": torch.cat([torch.empty(0, device=device), *values]),
                "start": torch.tensor(
                    [piece.start for piece in pieces], dtype=torch.long, device=device
                ),
                "count": torch.tensor(
                    [len(piece.values) for piece in pieces], dtype=torch.long, device=device
                ),
                "shape": torch.tensor(first, dtype=torch.long, device=device),
            },
        )
        shape, flat = tuple(gathered["shape"].tolist()), gathered["values"]
        if len(flat) != prod(shape) or not len(gathered["start"]):
            raise self._refusal(name, "all of it")
        whole = torch.empty_like(flat)
        for start, part in zip(
            gathered["start"].tolist(), torch.split(flat, gathered["count"].tolist()), strict=True
        ):
            whole[start : start + len(part)] = part
        return whole.view(shape)

    def _refusal(self, name: str, what: str) -> StrategyError:
        return StrategyError(
            f"strategy {self._hooks.name!r}: load_checkpoint() asks for {what} of {name!r}, which"
            f" save_checkpoint() did not return on rank {self._run.world.rank}; it cannot"
            " declare ema"
        )


def _slices(offset: Sequence[int], size: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o - a, o - a + n) for o, n, a in zip(offset, size, origin, strict=True))
