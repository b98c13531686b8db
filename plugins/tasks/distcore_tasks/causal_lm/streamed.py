"""Rows of a language model that are read and encoded when their step comes. A row is a
document, or a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_tasks.causal_lm.dataset import COUNTED, Arrays, SequenceDataset, empty_dataset
from distcore_tasks.causal_lm.encode import check_tokenizer, encode_some, make_tokenizer
from distcore_tasks.causal_lm.options import CausalOptions, Form
from distcore_tasks.causal_lm.rows import schema_of
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.sources import rows_name
from distcore_tasks.shared.streams.datasets import Encoded, StreamedDataset
from distcore_tasks.shared.streams.preparing import Streaming, open_stream

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedSequences(StreamedDataset):
    """Rows of tokens and their flags.

    In a batch a document longer than a window is cut into several, which do not
    attend to each other.
    """

    window: int
    """Most tokens that a sequence reads."""
    pad: int
    """Token that fills up shorter sequences."""
    layout: Callable[[SequenceDataset], SequenceDataset]
    """Puts the windows of a batch into sequences: ``one_row_per_sequence``, or several into one."""
    prompts: int = 0
    """Number of rows with a prompt for ``generate``, as ``SequenceDataset`` has them. None
    of these is cut.
    """

    def row_length(self, row: Encoded) -> int:
        """Return the tokens that a row reads."""
        return tokens_read(row)

    def row_items(self, row: Encoded) -> int:
        """Return the targets of a row, of which the first token is none."""
        return int(np.count_nonzero(row[1][1:] & COUNTED))

    @property
    def pads(self) -> bool:
        """True if each window is padded to the longest of a batch."""
        return self.layout(empty_dataset(self.pad)).pads

    def padded(self) -> StreamedSequences:
        """Return the same rows with padding."""
        return replace(self, layout=one_row_per_sequence)

    def encoded(self, indices: np.ndarray) -> list[Encoded]:
        """Return tokens and flags of the rows ``indices``, int64 ``(n,)``."""
        return self.rows.at(indices)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as ``SequenceDataset``
        or its ``layout`` does.
        """
        import torch

        arrays, owners, offsets = _windows(self.encoded(indices), self.window, self.pad)
        rows = SequenceDataset(
            arrays=arrays, items=arrays.lengths, pad=self.pad, prompts=0, content=self.content
        )
        batch = self.layout(rows).batch(np.arange(len(owners)))
        # dropout masks follow from the place in the row
        if "place" in batch or len(owners) > len(indices):
            place = batch.get("place", torch.arange(batch["row"].shape[1]))
            batch["place"] = place + torch.from_numpy(offsets)[batch["row"]]
        batch["row"] = torch.from_numpy(owners)[batch["row"]]
        batch["lengths"] = torch.from_numpy(self.lengths[indices])
        return (
            batch | rows.prompts_of(np.arange(len(indices)), indices < self.prompts)
            if self.prompts
            else batch
        )

    def completion(self, index: int) -> np.ndarray:
        """Return the targets right after a row's prompt, as ``SequenceDataset`` does."""
        arrays, *_ = _windows(self.encoded(np.array([index])), self.window, self.pad)
        row = SequenceDataset(
            arrays=arrays, items=arrays.lengths, pad=self.pad, prompts=1, content=self.content
        )
        return row.completion(0)


def tokens_read(row: Encoded) -> int:
    """Return the tokens that a row reads: all but its last."""
    return max(1, len(row[0]) - 1)


def one_row_per_sequence(windows: SequenceDataset) -> SequenceDataset:
    """Return the windows, a sequence each."""
    return windows


def _windows(
    rows: Sequence[Encoded], window: int, pad: int
) -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Cut rows into windows. Return these, and the row of each and its first
    place there, int64 ``(windows,)``.
    """
    # in place of a target of the last token
    after = np.array([pad], np.int32), np.zeros(1, np.uint8)
    tokens, flags = map(
        np.concatenate, zip(*(part for row in rows for part in (row, after)), strict=True)
    )
    sizes = np.fromiter((len(row[0]) for row in rows), np.int64, len(rows))
    begins, reads = np.cumsum(sizes + 1) - sizes - 1, np.maximum(sizes - 1, 1)
    counts = -(-reads // window)
    owners = np.repeat(np.arange(len(rows)), counts)
    offsets = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * window
    lengths = np.minimum(window, reads[owners] - offsets)
    return (
        Arrays(tokens=tokens, flags=flags, starts=begins[owners] + offsets, lengths=lengths),
        owners,
        offsets,
    )


def open_corpus(
    entry: Entry,
    options: CausalOptions,
    layout: Callable[[SequenceDataset], SequenceDataset],
    name: str,
    prompts: int,
) -> StreamedSequences:
    """Return a dataset, with the tokenizer of a cache entry. ``prompts``: number of
    rows with a prompt.
    """
    form: Form = entry.record["form"]
    rows, content = open_stream(entry, options, streaming_of(form, options), name)
    return StreamedSequences(
        rows=rows,
        window=options.max_seq_len,
        pad=int(entry.tokens["pad"]),
        layout=layout,
        prompts=prompts,
        content=content,
    )


def streaming_of(form: Form, options: CausalOptions) -> Streaming:
    """Return how rows are streamed."""

    def make(train: Callable[[], Iterable[Any]]) -> Any:
        tokenizer = make_tokenizer(options, train)
        check_tokenizer(rows_name(options.data, options), form, tokenizer)
        return tokenizer

    return Streaming(
        schema=schema_of(form, options.columns),
        make_tokenizer=make,
        encode=partial(encode_some, form, options),
        length=tokens_read,
        settings=[form, options.max_seq_len, options.end_documents],
        refuses=form != "documents",
    )
