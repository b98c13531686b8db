"""Texts that are read, tokenized and masked when their step comes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from distcore_tasks.masked_lm.dataset import Masking, masked_batch, with_positions
from distcore_tasks.masked_lm.encode import encode_some, make_tokenizer
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.masked_lm.rows import schema_of
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.streams.datasets import Encoded, StreamedDataset
from distcore_tasks.shared.streams.preparing import Streaming, open_stream

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedMasks(StreamedDataset):
    """Rows with the masks of one epoch, which depend on seed, epoch and row only."""

    masking: Masking
    """Settings of the masking."""
    pad: int
    """Padding token."""
    epoch: int = 0
    """Epoch of the masks; always 0 for evaluation."""
    tells_targets: bool = False
    """True if batches contain the positions of their targets."""

    def row_length(self, row: Encoded) -> int:
        """Return the tokens of a row."""
        return len(row[0])

    def row_items(self, row: Encoded) -> int:
        """Return the masked tokens of a row."""
        return self.masking.count(row[0])

    def at(self, epoch: int) -> StreamedMasks:
        """Return the rows with the masks of ``epoch``."""
        return replace(self, epoch=epoch)

    def with_targets(self) -> StreamedMasks:
        """Return the same rows, with target positions in the batches."""
        return replace(self, tells_targets=True)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as ``MaskedDataset`` does."""
        rows, places = (
            flat_rows([tokens for (tokens,) in self.rows.at(indices)]),
            np.arange(len(indices)),
        )
        batch = masked_batch(
            rows, places, self.items[indices], self.masking, self.epoch, indices, self.pad
        )
        return with_positions(batch) if self.tells_targets else batch


def open_texts(entry: Entry, options: MaskedOptions, masking: Masking, name: str) -> StreamedMasks:
    """Return a dataset, with the tokenizer of a cache entry."""
    rows, content = open_stream(entry, options, streaming_of(options), name)
    return StreamedMasks(rows=rows, masking=masking, pad=int(entry.tokens["pad"]), content=content)


def streaming_of(options: MaskedOptions) -> Streaming:
    """Return how texts are streamed."""
    return Streaming(
        schema=schema_of(options.columns),
        make_tokenizer=partial(make_tokenizer, options),
        encode=partial(encode_some, options),
        length=tokens_of_row,
        settings=[options.max_seq_len],
    )


def tokens_of_row(row: Encoded) -> int:
    """Return the tokens of a row."""
    return len(row[0])
