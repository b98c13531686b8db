"""The weights of a checkpoint that are evaluated and exported: their average, where the run kept one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from distcore.checkpoint.reader import Checkpoint
from distcore.model.averages import AVERAGE, average_name


def weights_of(names: Iterable[str]) -> str:
    """Return which weights are evaluated of a checkpoint with tensors of these names: ``ema`` or ``raw``."""
    return "ema" if any(name.startswith(AVERAGE) for name in names) else "raw"


class Evaluated:
    """A checkpoint with averaged weights in place of the weights, if it has any. Implements ``distcore.SavedState``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole tensor, a copy on the CPU."""
        return self._checkpoint[self._name(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor; reads none."""
        return self._checkpoint.shape(name)

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count`` of the flattened tensor, shape ``(count,)``."""
        return self._checkpoint.piece(self._name(name), start, count)

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements from ``offset`` on, in each dimension."""
        return self._checkpoint.box(self._name(name), offset, size)

    def _name(self, name: str) -> str:
        average = average_name(name)
        return average if average in self._checkpoint else name
