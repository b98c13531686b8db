"""Texts without labels, from one chunk of a data file. Each rank tokenizes only the
rows of its own batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distcore import ConstantColumn, FileRows
from distcore_data import row_error
from distcore_tasks.shared.padding import pads_left
from distcore_tasks.text_classification.dataset import model_inputs
from distcore_tasks.text_classification.encode import encode
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.prepare import TextDatasets
from distcore_tasks.text_classification.rows import columns_of, record_problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class UnlabeledTexts:
    """Texts without labels; implements ``distcore.Dataset``."""

    rows: FileRows
    """The text or texts of each row."""
    options: TextOptions
    """Options of the training run."""
    data: TextDatasets
    """The tokenizer and its padding token."""
    lengths: np.ndarray
    """Characters of each row, to batch rows of similar length without tokenizing."""
    items: ConstantColumn
    """Ones."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices`` in the form of ``TokenDataset.batch``, without labels."""
        records = [self.rows.records[index] for index in indices]
        seconds = (
            [str(record[1]) for record in records] if self.options.used_columns.text_pair else None
        )
        tokenizer = self.data.loaded_tokenizer
        encoded = encode(tokenizer, [str(record[0]) for record in records], seconds, self.options)
        fill = {
            "pad": self.data.pad,
            "type_pad": tokenizer.pad_token_type_id,
            "left": pads_left(self.options),
        }
        return model_inputs(np.arange(len(records)), encoded.tokens, encoded.types, **fill)


def unlabeled_texts(rows: FileRows, options: TextOptions, data: TextDatasets) -> UnlabeledTexts:
    """Return the texts of ``rows``. Raises DataError with file and row for an invalid text."""
    names = columns_of(options.used_columns, labeled=False)
    for number, record in enumerate(rows.records, rows.start):
        if problem := record_problem(names, record):
            raise row_error(f"data file {rows.file}", number, problem)
    lengths = np.fromiter(
        (sum(map(len, map(str, record))) for record in rows.records), np.int64, len(rows.records)
    )
    items = ConstantColumn(len(lengths), 1)
    return UnlabeledTexts(rows=rows, options=options, data=data, lengths=lengths, items=items)
