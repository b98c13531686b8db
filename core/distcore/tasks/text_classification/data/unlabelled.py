"""Texts without labels, a window of a file at a time; a rank tokenises those that it predicts, when it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distcore.data.files import row_error
from distcore.plugin.columns import ConstantColumn
from distcore.plugin.task import FileRows
from distcore.tasks.sources import text_problem
from distcore.tasks.text_classification.data.text import TextDatasets
from distcore.tasks.text_classification.data.tokens import pad_rows
from distcore.tasks.text_classification.options import TextOptions
from distcore.tasks.text_classification.padding import pads_left
from distcore.tasks.tokenizing import tokenize

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class UnlabelledTexts:
    """Implements ``Dataset`` of ``distcore.plugin.task``."""

    rows: FileRows
    """The text of each row."""
    options: TextOptions
    """What the model was trained with."""
    data: TextDatasets
    """The tokenizer, and the token to pad with."""
    lengths: np.ndarray
    """Characters of each text: enough to put rows of like length together, and known without tokenising."""
    items: ConstantColumn
    """Ones."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` of the rows ``indices``, as ``TokenDataset.batch`` does."""
        texts = [str(self.rows.records[index][0]) for index in indices]
        tokens, lengths, _ = tokenize(self.data.loaded_tokenizer, texts, self.options.max_seq_len)
        starts = np.cumsum(lengths) - lengths
        return pad_rows(tokens, starts, lengths, self.data.pad, pad_left=pads_left(self.options))


def unlabelled_texts(rows: FileRows, options: TextOptions, data: TextDatasets) -> UnlabelledTexts:
    """Return the texts of ``rows``; raises DataError, which names file and row, for one that cannot be used."""
    for number, (text,) in enumerate(rows.records, rows.start):
        if problem := text_problem(text):
            raise row_error(f"data file {rows.file}", number, problem)
    lengths = np.fromiter((len(str(text)) for (text,) in rows.records), np.int64, len(rows.records))
    items = ConstantColumn(len(lengths), 1)
    return UnlabelledTexts(rows=rows, options=options, data=data, lengths=lengths, items=items)
