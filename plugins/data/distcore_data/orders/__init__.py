"""Orders of rows that respect where rows lie: windows of shards, and mixtures of
sources. Begin with `windows`.
"""

from __future__ import annotations

from typing import Protocol

from distcore import Column


class RowOrder(Protocol):
    """An order of rows as a function of seed and epoch, which is all that it depends on."""

    @property
    def content(self) -> str:
        """Digest of everything that the order depends on besides seed and epoch."""
        ...

    def __call__(self, seed: int, epoch: int) -> Column:
        """Return the row at each position of ``epoch``, counted from 0."""
        ...
