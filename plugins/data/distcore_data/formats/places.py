"""Places in a file from which a reader can go on, so that a row is read without all before it."""

from __future__ import annotations

from typing import NamedTuple

EVERY, EVERY_OF_TAR = 32, 2
"""Rows of a text file, and of a tar file, from one place to the next: members take longer to
pass over than lines.
"""


class Place(NamedTuple):
    """A row at which a reader may begin."""

    row: int = 0
    """Rows before it."""
    part: int = 0
    """Bytes before it, of a compressed file decompressed.

    Of Parquet and Arrow the row groups or batches, of a folder the shards.
    """
    inner: int = 0
    """Lines before it; of a folder the rows of its shard."""

    @property
    def is_start(self) -> bool:
        """True at the first byte of a file."""
        return not self.part


START = Place()
