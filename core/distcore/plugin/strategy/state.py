"""The state of a run as checkpoints have it: whole tensors, and parts spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a sharded tensor: consecutive elements of the flattened tensor.

    Flattened means in row-major order, as by ``tensor.reshape(-1)``. Rows ``i`` to ``j`` of a
    matrix are a piece, and so is a slice of a flat buffer; a range of its columns is not.
    """

    values: Tensor
    """The elements, shape ``(count,)``."""
    start: int
    """Index of the first element in the flattened tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    replica: bool = False
    """True if another rank returns the same elements, and a checkpoint takes them from there."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that is spread over ranks: a range of indices in each dimension.

    A shard along any dimensions is one, such as a block of columns. Where a part is also one run of
    elements in row-major order, ``Piece`` says the same with fewer numbers.
    """

    values: Tensor
    """The elements; the shape is the size of the box, with as many dimensions as the whole."""
    offset: tuple[int, ...]
    """Index of its first element in each dimension of the whole."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    replica: bool = False
    """True if another rank returns the same elements, and a checkpoint takes them from there."""


State = dict[str, "Tensor | Piece | Box | Sequence[Box]"]
"""The tensors that a rank holds, by name: ``model/NAME`` (parameter or buffer),
``optimizer/NAME/exp_avg`` and so on. The keys of the optimizer are those of its own state.

A ``Tensor`` is whole on every rank. A ``Piece``, or one or several ``Box``, is part
of a sharded tensor.
"""


class SavedState(Protocol):
    """A checkpoint to load from. A tensor is read from disk only when it is needed."""

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole tensor, on the CPU. Raises CheckpointError for an unknown name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor, without reading it.

        Raises CheckpointError for an unknown name.
        """

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count``, flat: shape ``(count,)``, on the CPU.

        Raises CheckpointError if there is no such tensor or it has fewer elements.
        """

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements from index ``offset`` on, in each dimension, on the CPU."""
