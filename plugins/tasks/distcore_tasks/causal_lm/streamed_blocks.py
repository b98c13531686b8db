"""Blocks of a stream of documents, by number: only where each begins is stored, not its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcore import Column
from distcore_tasks.causal_lm.streamed import StreamedSequences
from distcore_tasks.shared.arrays import ArrayFile
from distcore_tasks.shared.stored_arrays import StoredArray, open_array
from distcore_tasks.shared.streams.datasets import Encoded


@dataclass(frozen=True, slots=True)
class BlockLengths:
    """Tokens that each block reads; implements ``distcore.Column``."""

    tokens: int
    """Tokens that all read."""
    block: int
    """Tokens that each but the last reads."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return -(-self.tokens // self.block)

    def __getitem__(self, blocks: np.ndarray) -> np.ndarray:
        """Return the lengths of ``blocks``, both int64 ``(n,)``."""
        lengths: np.ndarray = np.minimum(self.block, self.tokens - blocks * self.block)
        return lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedBlocks(StreamedSequences):
    """The blocks that ``encode`` cuts of documents. A block's last target is the first
    token of the next one.
    """

    documents: StoredArray
    """The document with the first token of each block, and that with the last
    token of all, int64.
    """
    offsets: StoredArray
    """Places of these tokens in their documents, int64."""
    tokens: int
    """Tokens that all blocks read."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.lengths)

    @property
    def lengths(self) -> Column:
        """Tokens that each block reads."""
        return BlockLengths(self.tokens, self.window)

    @property
    def items(self) -> Column:
        """Targets of each block: as many as tokens that it reads."""
        return self.lengths

    def encoded(self, indices: np.ndarray) -> list[Encoded]:
        """Return tokens and flags of the blocks ``indices``, int64 ``(n,)``."""
        firsts, lasts = self.documents[indices], self.documents[indices + 1]
        asked = np.unique(
            np.concatenate([np.arange(*pair) for pair in zip(firsts, lasts + 1, strict=True)])
        )
        read = dict(zip(asked.tolist(), self.rows.at(asked), strict=True))
        begins, sizes = self.offsets[indices].tolist(), (self.lengths[indices] + 1).tolist()
        blocks = list[Encoded]()
        for first, last, begin, size in zip(
            firsts.tolist(), lasts.tolist(), begins, sizes, strict=True
        ):
            tokens, flags = map(
                np.concatenate, zip(*map(read.__getitem__, range(first, last + 1)), strict=True)
            )
            blocks.append((tokens[begin : begin + size], flags[begin : begin + size]))
        return blocks


def write_blocks(documents: Iterable[np.ndarray], block: int, folder: Path) -> int:
    """Write to the folder of a dataset where each block begins. Return the number of tokens
    that all blocks read.
    """
    begin, last = 0, (0, 0)
    with (
        ArrayFile(folder / "documents.npy", np.int64) as numbers,
        ArrayFile(folder / "offsets.npy", np.int64) as places,
    ):
        for number, tokens in enumerate(documents):
            offsets = np.arange(-begin % block, len(tokens), block)
            numbers.add(np.full_like(offsets, number))
            places.add(offsets)
            begin += len(tokens)
            last = (number, len(tokens) - 1) if len(tokens) else last
        if (begin - 1) % block:  # else a block begins there, which has no target and is none
            numbers.add(np.array(last[:1]))
            places.add(np.array(last[1:]))
    return max(0, begin - 1)


def open_blocks(rows: StreamedSequences, folder: Path, tokens: int) -> StreamedBlocks:
    """Return the blocks of the documents ``rows``; ``tokens``: the result of ``write_blocks``."""
    own = {name: getattr(rows, name) for name in StreamedSequences.__dataclass_fields__}
    documents, offsets = (open_array(folder / f"{name}.npy") for name in ("documents", "offsets"))
    return StreamedBlocks(**own, documents=documents, offsets=offsets, tokens=tokens)
