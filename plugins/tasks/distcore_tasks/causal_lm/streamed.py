"""Documents that are read and tokenized when their step comes: of a corpus nothing but its index is stored.

A row is a document. Which one a step has is a function of the order, so a resume and any number of ranks have the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import Column
from distcore_data import IndexedRows, RowOrder, row_error
from distcore_tasks.causal_lm.dataset import COUNTED, Arrays, SequenceDataset, empty_dataset
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.shared.tokenize_rows import chunks, token_lists

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 2**22
"""Most tokens that are kept: a step asks for those of its rows three times, for lengths, items and batches."""
SAMPLE = 10_000
"""Most documents on which the vocabulary of a built-in model is trained."""


class Documents:
    """The tokens of documents by number, with those that were asked for last in memory."""

    def __init__(self, name: str, rows: IndexedRows, tokenizer: Any, end: Sequence[int]) -> None:
        """Read the texts of ``rows``, which messages call ``name``; ``end``: the tokens that end a document."""
        self._name, self._rows, self._tokenizer, self._end = name, rows, tokenizer, list(end)
        self._kept, self._size = OrderedDict[int, np.ndarray](), 0

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._rows)

    def tokens(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of documents, int32 ``(tokens,)`` each. Raises DataError with the row."""
        missing = [number for number in np.unique(numbers).tolist() if number not in self._kept]
        texts = checked_texts(self._name, missing, self._rows)
        for number, tokens in zip(missing, self._tokenized(texts), strict=True):
            self._kept[number], self._size = tokens, self._size + len(tokens)
        asked = [self._kept[number] for number in numbers.tolist()]
        for number in numbers.tolist():
            self._kept.move_to_end(number)
        while self._size > KEPT:
            self._size -= len(self._kept.popitem(last=False)[1])
        return asked

    def _tokenized(self, texts: Iterable[str]) -> Iterable[np.ndarray]:
        for some in chunks(texts):
            for tokens in token_lists(self._tokenizer, some, special=True):
                yield np.asarray(tokens if tokens[-1:] == self._end else tokens + self._end, np.int32)


def checked_texts(name: str, numbers: Sequence[int], rows: IndexedRows) -> list[str]:
    """Return the texts of documents. Raises DataError with the row for one that cannot be tokenized."""
    texts = []
    for number, (text,) in zip(numbers, rows[numbers], strict=True):
        if problem := text_problem(text):
            raise row_error(name, number + 1, problem)
        texts.append(str(text))
    return texts


def sampled_texts(name: str, rows: IndexedRows) -> list[str]:
    """Return the texts of some documents, evenly spread over all."""
    numbers = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLE)).astype(np.int64))
    return checked_texts(name, numbers.tolist(), rows)


@dataclass(frozen=True, eq=False, slots=True)
class Predicted:
    """Tokens of each document that are predicted: all but its first; a column."""

    documents: Documents
    """The documents."""
    least: int
    """Of a document of one token."""

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each of ``rows``, int64 ``(n,)``."""
        sizes = np.fromiter(map(len, self.documents.tokens(rows)), np.int64, len(rows))
        return np.maximum(sizes - 1, self.least)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StreamedDataset:
    """Documents, read and tokenized by number; implements ``distcore.Dataset``.

    In a batch a document longer than a window is cut into several, which do not attend to each other.
    """

    documents: Documents
    """The documents."""
    window: int
    """Most tokens that a sequence reads."""
    pad: int
    """Token that fills up shorter sequences."""
    layout: Callable[[SequenceDataset], SequenceDataset]
    """Puts the windows of a batch into sequences: ``apart``, or several into one."""
    content: str
    """Digest of the corpus, and of what makes tokens of it."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents)

    @property
    def lengths(self) -> Column:
        """Tokens that each row reads."""
        return Predicted(self.documents, 1)

    @property
    def items(self) -> Column:
        """Targets of each row."""
        return Predicted(self.documents, 0)

    @property
    def pads(self) -> bool:
        """True if each window is padded to the longest of a batch."""
        return self.layout(empty_dataset(self.pad)).pads

    def padded(self) -> StreamedDataset:
        """Return the same rows with padding."""
        return replace(self, layout=apart)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as ``SequenceDataset`` or its ``layout`` does."""
        import torch

        arrays, owners = _windows(self.documents.tokens(indices), self.window, self.pad)
        rows = SequenceDataset(arrays=arrays, items=arrays.lengths, pad=self.pad, prompts=0, content=self.content)
        batch = self.layout(rows).batch(np.arange(len(owners)))
        batch["row"] = torch.from_numpy(owners)[batch["row"]]
        batch["lengths"] = torch.from_numpy(self.lengths[indices])
        return batch


def apart(windows: SequenceDataset) -> SequenceDataset:
    """Return the windows, a sequence each."""
    return windows


def _windows(documents: Sequence[np.ndarray], window: int, pad: int) -> tuple[Arrays, np.ndarray]:
    """Cut documents into windows. Return these as rows, and the document of each, int64 ``(windows,)``."""
    after = np.array([pad], np.int32)  # what would be the target of the last token, and is none
    tokens = np.concatenate([part for document in documents for part in (document, after)])
    sizes = np.fromiter(map(len, documents), np.int64, len(documents))
    begins, reads = np.cumsum(sizes + 1) - sizes - 1, np.maximum(sizes - 1, 1)
    flags = np.full(len(tokens), COUNTED, np.uint8)
    flags[begins + sizes] = 0
    counts = -(-reads // window)
    owners = np.repeat(np.arange(len(documents)), counts)
    offsets = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * window
    lengths = np.minimum(window, reads[owners] - offsets)
    return Arrays(tokens=tokens, flags=flags, starts=begins[owners] + offsets, lengths=lengths), owners
