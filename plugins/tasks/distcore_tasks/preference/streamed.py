"""Preferences that are read and tokenized when their step comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from distcore_tasks.preference.dataset import PreferenceDataset
from distcore_tasks.preference.encode import encode_some, make_tokenizer
from distcore_tasks.preference.options import PairOptions
from distcore_tasks.preference.rows import NAMES, schema_of
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.streams.datasets import Encoded, StreamedRows
from distcore_tasks.shared.streams.preparing import Streaming, open_stream

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedPreferences(StreamedRows):
    """Rows whose batches pair each prompt with the next row's chosen answer, too."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as ``PreferenceDataset`` does."""
        next_rows = (indices + 1) % len(self)
        # Each row is followed by its next one, where ``PreferenceDataset`` looks for it.
        with_next = np.stack([indices, next_rows], axis=1).ravel()
        dataset = self.stored(self.rows.at(with_next))
        batch: dict[str, Tensor] = dataset.batch(np.arange(0, len(with_next), 2))
        return batch


def streaming_of(options: PairOptions) -> Streaming:
    """Return how preferences are streamed."""
    return Streaming(
        schema=schema_of(options.columns),
        make_tokenizer=partial(make_tokenizer, options),
        encode=partial(encode_some, options.max_seq_len),
        length=_length,
        settings=[options.max_seq_len],
    )


def open_streamed(entry: Entry, options: PairOptions, name: str) -> StreamedRows:
    """Return a dataset, with the tokenizer of a cache entry."""
    rows, content = open_stream(entry, options, streaming_of(options), name)
    kind = StreamedPreferences if options.mismatched else StreamedRows
    return kind(
        rows=rows,
        content=content,
        stored=partial(_stored, int(entry.tokens["pad"]), options.mismatched),
    )


def _length(row: Encoded) -> int:
    """Return the tokens of a row's two sequences, each of which begins with the prompt."""
    prompt, chosen, rejected = map(len, row)
    return 2 * prompt + chosen + rejected


def _stored(pad: int, mismatched: bool, rows: Sequence[Encoded]) -> PreferenceDataset:
    """Return encoded rows as a dataset in memory."""
    texts = {}
    for part, name in enumerate(NAMES):
        texts[name] = flat_rows([row[part] for row in rows])
    return PreferenceDataset(texts=texts, pad=pad, content="", mismatched=mismatched)
