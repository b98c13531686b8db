"""Blocks: the rows of many values, joined and cut into parts of one length.

A block has one entry more than it reads, because its last target is the entry after it. So each
block but the last ends with the entry with which the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from distcore_tasks.rows.lazy_table import StreamedTable
from distcore_tasks.rows.table import BLOCKS, CachedTable, Rows, Table, cut_table, open_table
from distcore_tasks.rows.table_files import TableWriter
from distcore_tasks.shared.arrays import ArrayFile
from distcore_tasks.shared.jagged import Jagged, Spans
from distcore_tasks.shared.stored_arrays import StoredArray, open_array

AT_ONCE = 2**20
"""Entries of blocks that are looked at in one go."""
BlockNumbers = Callable[[CachedTable], Mapping[str, np.ndarray]]
"""``RowPipeline.block_numbers``."""


def write_blocks(
    folder: Path, block: int, bounds: Sequence[int], numbers: BlockNumbers
) -> list[int]:
    """Cut the stored rows of a ``folder`` into blocks, and write where these are.

    ``bounds``: first row of each source of a mixture, and the end of the last one. No block has
    entries of two sources. Returns the first block of each source, and the end of the last one.
    """
    table = open_table(folder)
    starts, ends, first_blocks = _cut(_first_jagged(table), block, bounds)
    step = max(1, AT_ONCE // (block + 1))
    with TableWriter(folder / BLOCKS) as writer:
        # Once at least: the first ones say which columns there are.
        for first in range(0, max(1, len(starts)), step):
            some = slice(first, first + step)
            places = {"starts": starts[some], "ends": ends[some]}
            blocks = cut_table(table, CachedTable(places))
            writer.add(CachedTable({**places, **numbers(blocks)}))
        writer.finish()
    return first_blocks if bounds else []


def _cut(
    rows: Jagged, block: int, bounds: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return start and end of each block, int64, and the first block of each source."""
    entries = len(rows.values)
    # A source without rows begins where the next one does; the last one may have none, either.
    begins = [int(rows.starts[bound]) if bound < len(rows) else entries for bound in bounds[:-1]]
    starts, ends, first_blocks = list[np.ndarray](), list[np.ndarray](), [0]
    for begin, end in pairwise([*(begins or [0]), entries]):
        # The last entry of a source is only a target.
        own = np.arange(begin, end - 1, block, dtype=np.int64)
        starts.append(own)
        ends.append(np.minimum(own + block + 1, end))
        first_blocks.append(first_blocks[-1] + len(own))
    return np.concatenate(starts), np.concatenate(ends), first_blocks


def blocks_at(
    table: CachedTable, starts: np.ndarray, ends: np.ndarray, numbers: BlockNumbers
) -> CachedTable:
    """Return the blocks from ``starts`` to ``ends``, int64, of the joined rows of a table."""
    places = {"starts": starts, "ends": ends}
    blocks = cut_table(table, CachedTable(places))
    return cut_table(table, CachedTable({**places, **numbers(blocks)}))


def block_places(table: Table, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return start and end of some blocks in the joined rows; ``None`` for a table of rows."""
    if isinstance(table, StreamedBlocks):
        starts = blocks * table.lengths.block
        return starts, starts + table.lengths[blocks] + 1
    if isinstance(table, CachedTable):
        for column in table.columns.values():
            if isinstance(column, Spans):
                return column.starts[blocks], column.ends[blocks]
    return None


def _first_jagged(table: CachedTable) -> Jagged:
    return next(column for column in table.columns.values() if isinstance(column, Jagged))


@dataclass(frozen=True, slots=True)
class BlockLengths:
    """Entries that each block of a stream reads; implements ``distcore.Column``."""

    entries: int
    """Entries that all read."""
    block: int
    """Entries that each but the last reads."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return -(-self.entries // self.block)

    def __getitem__(self, blocks: np.ndarray) -> np.ndarray:
        """Return the lengths of ``blocks``, both int64 ``(n,)``."""
        lengths: np.ndarray = np.minimum(self.block, self.entries - blocks * self.block)
        return lengths


@dataclass(frozen=True, eq=False, slots=True)
class StreamedBlocks:
    """Blocks of rows that are encoded when they are asked for; implements ``Table``."""

    rows: StreamedTable
    """The rows that are cut; a block has entries of one or more."""
    firsts: StoredArray
    """Row of the first entry of each block, and of the last entry of all, int64."""
    offsets: StoredArray
    """Places of these entries in their rows, int64."""
    lengths: BlockLengths
    """Entries that each block reads."""
    numbers: BlockNumbers
    """Return the columns with one number per block."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.lengths)

    def take(self, numbers: np.ndarray) -> Rows:
        """Return some blocks. Raises DataError with the row in its source."""
        firsts, lasts = self.firsts[numbers], self.firsts[numbers + 1]
        rows_of_blocks = [
            np.arange(first, last + 1) for first, last in zip(firsts, lasts, strict=True)
        ]
        # Blocks share rows, which are read once. Those of a block follow each other here, too.
        wanted = np.unique(np.concatenate([firsts, *rows_of_blocks]))
        rows = self.rows.take(wanted).table
        begins = _first_jagged(rows).starts[np.searchsorted(wanted, firsts)]
        starts = begins + self.offsets[numbers]
        return blocks_at(rows, starts, starts + self.lengths[numbers] + 1, self.numbers).all()


def write_streamed_blocks(lengths: Iterable[int], block: int, folder: Path) -> BlockLengths:
    """Write to the new folder of a dataset where each block begins.

    ``lengths``: entries of each row that is cut.
    """
    folder.mkdir()
    entries, last_row, last_offset = 0, 0, 0
    with (
        ArrayFile(folder / "firsts.npy", np.int64) as rows,
        ArrayFile(folder / "offsets.npy", np.int64) as places,
    ):
        for number, length in enumerate(lengths):
            offsets = np.arange(-entries % block, length, block)
            rows.add(np.full_like(offsets, number))
            places.add(offsets)
            entries += length
            if length:
                last_row, last_offset = number, length - 1
        # If a block begins at the last entry, its place is written already. It has no target, and
        # does not count.
        if (entries - 1) % block:
            rows.add(np.array([last_row]))
            places.add(np.array([last_offset]))
    read = max(0, entries - 1)
    np.save(folder / "entries.npy", read)
    return BlockLengths(read, block)


def open_streamed_blocks(
    rows: StreamedTable, block: int, folder: Path, numbers: BlockNumbers
) -> StreamedBlocks:
    """Return the blocks of ``rows`` whose places ``write_streamed_blocks`` wrote."""
    return StreamedBlocks(
        rows,
        open_array(folder / "firsts.npy"),
        open_array(folder / "offsets.npy"),
        BlockLengths(int(np.load(folder / "entries.npy")), block),
        numbers,
    )
