"""Words without tags, in chunks of a file. Each rank tokenizes the rows of its batches only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import ConstantColumn, FileRows
from distcore_data import row_error
from distcore_tasks.token_classification.encode import tokenize_words
from distcore_tasks.token_classification.rows import words_problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class UntaggedWords:
    """Implements ``Dataset`` of ``distcore.plugin.task.task``."""

    rows: FileRows
    """Words of each row."""
    tokenizer: Any
    """The model's tokenizer."""
    max_seq_len: int
    """Maximum number of tokens of a row."""
    pad: int
    """Padding token."""
    lengths: np.ndarray
    """Words of each row. They serve to batch rows of like length, without tokenizing."""
    items: ConstantColumn
    """Ones."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices`` as ``TaggedDataset.batch`` does, without labels."""
        records: Any = [self.rows.records[index] for index in indices]
        words = tokenize_words(self.tokenizer, [row for (row,) in records], self.max_seq_len)
        return words.batch(np.arange(len(indices)), self.pad)


def untagged_words(rows: FileRows, tokenizer: Any, max_seq_len: int, pad: int) -> UntaggedWords:
    """Return the words of ``rows``. Raises DataError with file and row for an invalid one."""
    for number, (words,) in enumerate(rows.records, rows.start):
        if problem := words_problem(words):
            raise row_error(f"data file {rows.file}", number, problem)
    records: Any = rows.records
    lengths = np.fromiter((len(words) for (words,) in records), np.int64, len(records))
    items = ConstantColumn(len(lengths), 1)
    return UntaggedWords(
        rows=rows,
        tokenizer=tokenizer,
        max_seq_len=max_seq_len,
        pad=pad,
        lengths=lengths,
        items=items,
    )
