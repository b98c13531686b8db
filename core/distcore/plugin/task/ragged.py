"""Outputs whose rows differ in size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different sizes, joined: ``ragged[i]`` is row i, ``len(ragged)`` the number of rows.

    Tensors padded to ``(n, longest, …)``, with a mask ``(n, longest)`` of real
    entries, become ``Ragged(padded[mask], mask.sum(1))``.
    """

    values: Tensor
    """The entries of all rows in order, shape ``(sum(lengths), …)``, any dtype."""
    lengths: Tensor
    """How many entries each row has, int64, shape ``(n,)``; 0 is possible."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        """Return the entries of one row, ``(lengths[row], …)``; IndexError for no such row."""
        end = self._ends[row]
        return self.values[end - int(self.lengths[row]) : end]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the entries of each row."""
        return map(self.__getitem__, range(len(self)))

    def take(self, rows: Tensor) -> Ragged:
        """Return the rows ``rows``, int64 ``(m,)``, in this order; a row may come several times."""
        lengths = self.lengths[rows]
        ends = lengths.cumsum(0)
        # Entry j of the answer lies as far behind the start of its row as it does here.
        shift = (self.lengths.cumsum(0)[rows] - ends).repeat_interleave(lengths)
        entries = torch.arange(len(shift), device=shift.device) + shift
        return Ragged(self.values[entries], lengths)

    @cached_property
    def _ends(self) -> list[int]:
        return self.lengths.cumsum(0).tolist()
