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

    A batch has a document that is longer than a window as several windows, which do not attend to
    each other.
    """

    window: int
    """Most tokens that a sequence reads."""
    pad: int
    """Token that fills up shorter sequences."""
    layout: Callable[[SequenceDataset], SequenceDataset]
    """Puts the windows of a batch into sequences: ``one_row_per_sequence``, or several into one."""
    prompts: int = 0
    """Number of rows with a prompt for ``generate``. These are the first rows, and a dataset that
    has any cuts no row into windows.
    """

    def row_length(self, row: Encoded) -> int:
        """Return the tokens that a row reads."""
        return tokens_read(row)

    def row_items(self, row: Encoded) -> int:
        """Return the number of targets of a row."""
        _tokens, flags = row
        # No token comes before the first one to predict it from.
        flags_after_first = flags[1:]
        return int(np.count_nonzero(flags_after_first & COUNTED))

    @property
    def pads(self) -> bool:
        """True if each window is padded to the longest of a batch."""
        # It depends on the layout alone, so a dataset without rows tells it.
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

        windows, row_of_window, offset_of_window = self._windows(indices, prompts=0)
        batch = self.layout(windows).batch(np.arange(len(windows)))
        window_of_token = batch["row"]
        # Dropout masks follow from a token's place in its row. A batch without places has each
        # window in a line of its own; if no row is cut, the core counts the places itself.
        is_any_row_cut = len(windows) > len(indices)
        if "place" in batch or is_any_row_cut:
            column = torch.arange(window_of_token.shape[1])
            place_in_window = batch.get("place", column)
            batch["place"] = place_in_window + torch.from_numpy(offset_of_window)[window_of_token]
        batch["row"] = torch.from_numpy(row_of_window)[window_of_token]
        batch["lengths"] = torch.from_numpy(self.lengths[indices])
        if self.prompts:
            # No row is cut here, so the windows are numbered as the rows of the batch are.
            has_prompt = indices < self.prompts
            batch |= windows.prompts_of(np.arange(len(indices)), has_prompt)
        return batch

    def completion(self, index: int) -> np.ndarray:
        """Return the targets right after a row's prompt, as ``SequenceDataset`` does."""
        windows, _, _ = self._windows(np.array([index]), prompts=1)
        return windows.completion(0)

    def _windows(
        self, indices: np.ndarray, prompts: int
    ) -> tuple[SequenceDataset, np.ndarray, np.ndarray]:
        """Return the windows of the rows ``indices``, of which the first ``prompts`` have a prompt.

        With them: the place in ``indices`` of each window's row, and the place in that row of the
        window's first token, both int64 ``(windows,)``.
        """
        arrays, row_of_window, offset_of_window = _cut_into_windows(
            self.encoded(indices), self.window, self.pad
        )
        windows = SequenceDataset(
            arrays=arrays,
            items=arrays.lengths,  # in place of the targets, which no batch asks for
            pad=self.pad,
            prompts=prompts,
            content=self.content,
        )
        return windows, row_of_window, offset_of_window


def tokens_read(row: Encoded) -> int:
    """Return the number of tokens that a row reads: all but its last, and at least one, so that
    no row is empty.
    """
    tokens, *_ = row
    return max(1, len(tokens) - 1)


def one_row_per_sequence(windows: SequenceDataset) -> SequenceDataset:
    """Return the windows, a sequence each."""
    return windows


def _cut_into_windows(
    rows: Sequence[Encoded], window: int, pad: int
) -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Return the windows of rows, each of at most ``window`` tokens that it reads.

    With them: the row of each window, and the place in that row of its first token, both int64
    ``(windows,)``.
    """
    # A row of one token reads it, so a target must come after it; this one is not counted.
    token_after_row = np.array([pad], np.int32)
    flag_after_row = np.zeros(1, np.uint8)
    token_parts: list[np.ndarray] = []
    flag_parts: list[np.ndarray] = []
    for row_tokens, row_flags in rows:
        token_parts += [row_tokens, token_after_row]
        flag_parts += [row_flags, flag_after_row]

    row_sizes = np.fromiter((len(row_tokens) for row_tokens, _ in rows), np.int64, len(rows))
    stored_sizes = row_sizes + 1
    start_of_row = np.cumsum(stored_sizes) - stored_sizes
    tokens_read_by_row = np.maximum(row_sizes - 1, 1)

    windows_of_row = -(-tokens_read_by_row // window)
    row_of_window = np.repeat(np.arange(len(rows)), windows_of_row)
    first_window_of_row = np.cumsum(windows_of_row) - windows_of_row
    number_in_row = np.arange(len(row_of_window)) - first_window_of_row[row_of_window]
    offset_of_window = number_in_row * window
    tokens_from_offset = tokens_read_by_row[row_of_window] - offset_of_window
    arrays = Arrays(
        tokens=np.concatenate(token_parts),
        flags=np.concatenate(flag_parts),
        starts=start_of_row[row_of_window] + offset_of_window,
        lengths=np.minimum(window, tokens_from_offset),
    )
    return arrays, row_of_window, offset_of_window


def open_corpus(
    entry: Entry,
    options: CausalOptions,
    layout: Callable[[SequenceDataset], SequenceDataset],
    name: str,
    prompts: int,
) -> StreamedSequences:
    """Return the rows of the dataset ``name``, encoded by the tokenizer of a cache entry.

    ``prompts``: number of rows with a prompt.
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
    """Return how rows of a form are read, encoded and measured."""

    def make_checked_tokenizer(train: Callable[[], Iterable[Any]]) -> Any:
        tokenizer = make_tokenizer(options, train)
        check_tokenizer(rows_name(options.data, options), form, tokenizer)
        return tokenizer

    return Streaming(
        schema=schema_of(form, options.columns),
        make_tokenizer=make_checked_tokenizer,
        encode=partial(encode_some, form, options),
        length=tokens_read,
        settings=[form, options.max_seq_len, options.end_documents],
        refuses=form != "documents",
    )
