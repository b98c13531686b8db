"""Texts that are read, tokenized and masked when their step comes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_tasks.masked_lm.dataset import Masking, masked_batch, with_positions
from distcore_tasks.masked_lm.embedded import EMBEDDED
from distcore_tasks.masked_lm.encode import encode_some
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.masked_lm.rows import schema_of
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer
from distcore_tasks.shared.sources import source_file
from distcore_tasks.shared.streams.datasets import Encoded, EncodedRows, StreamedDataset
from distcore_tasks.shared.streams.preparing import stream_digest
from distcore_tasks.shared.streams.values import NumberedValues, open_values

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedMasks(StreamedDataset):
    """Training rows with the masks of one epoch, which depend on seed, epoch and row only."""

    masking: Masking
    """Settings of the masking."""
    pad: int
    """Padding token."""
    epoch: int = 0
    """Epoch of the masks."""
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
        rows, places = flat_rows([tokens for (tokens,) in self.rows.at(indices)]), np.arange(len(indices))
        batch = masked_batch(rows, places, self.items[indices], self.masking, self.epoch, indices, self.pad)
        return with_positions(batch) if self.tells_targets else batch


def encoded_texts(values: NumberedValues[str], tokenizer: Any, options: MaskedOptions) -> EncodedRows:
    """Return the tokens of texts by number."""
    return EncodedRows(values, partial(encode_some, tokenizer, options))


def open_texts(entry: Entry, options: MaskedOptions, masking: Masking) -> StreamedMasks:
    """Return the training rows, with the tokenizer of a cache entry."""
    source = source_file(options.data, EMBEDDED, options.filter)
    values = open_values(source, schema_of(options.columns), entry.folder / "train")
    return StreamedMasks(
        rows=encoded_texts(values, load_tokenizer(options.model, entry.tokenizer), options),
        masking=masking,
        pad=int(entry.tokens["pad"]),
        content=stream_digest(entry, options, values, [options.max_seq_len]),
    )
