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
    """The blocks that ``encode`` cuts from documents.

    A block's last target is the first token of the next one.
    """

    documents: StoredArray
    """Document of the first token of each block, and of the last token of all, int64."""
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
        documents_of_blocks = [
            np.arange(first, last + 1) for first, last in zip(firsts, lasts, strict=True)
        ]
        # Blocks share documents, which are read once.
        numbers = np.unique(np.concatenate(documents_of_blocks))
        documents = dict(zip(numbers.tolist(), self.rows.at(numbers), strict=True))
        begins = self.offsets[indices].tolist()
        # One more, because a block's last target is the token after it.
        sizes = (self.lengths[indices] + 1).tolist()
        blocks = list[Encoded]()
        for block, begin, size in zip(documents_of_blocks, begins, sizes, strict=True):
            parts = [documents[number] for number in block.tolist()]
            tokens = np.concatenate([tokens for tokens, _ in parts])
            flags = np.concatenate([flags for _, flags in parts])
            blocks.append((tokens[begin : begin + size], flags[begin : begin + size]))
        return blocks


def write_blocks(documents: Iterable[np.ndarray], block: int, folder: Path) -> int:
    """Write to the folder of a dataset where each block begins.

    Returns the number of tokens that all blocks read.
    """
    tokens_before = 0
    last_document, last_offset = 0, 0
    with (
        ArrayFile(folder / "documents.npy", np.int64) as numbers,
        ArrayFile(folder / "offsets.npy", np.int64) as places,
    ):
        for number, tokens in enumerate(documents):
            first_offset = -tokens_before % block
            offsets = np.arange(first_offset, len(tokens), block)
            numbers.add(np.full_like(offsets, number))
            places.add(offsets)
            tokens_before += len(tokens)
            if len(tokens):
                last_document, last_offset = number, len(tokens) - 1
        # If a block begins at the last token, its place is written already. It has no target, and
        # does not count.
        if (tokens_before - 1) % block:
            numbers.add(np.array([last_document]))
            places.add(np.array([last_offset]))
    return max(0, tokens_before - 1)


def open_blocks(rows: StreamedSequences, folder: Path, tokens: int) -> StreamedBlocks:
    """Return the blocks of the documents ``rows``; ``tokens``: the result of ``write_blocks``."""
    fields = {name: getattr(rows, name) for name in StreamedSequences.__dataclass_fields__}
    return StreamedBlocks(
        **fields,
        documents=open_array(folder / "documents.npy"),
        offsets=open_array(folder / "offsets.npy"),
        tokens=tokens,
    )
