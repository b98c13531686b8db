"""Sources without targets, in chunks of a file. Each rank tokenizes the
rows of its batches only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import ConstantColumn, FileRows
from distcore_data import row_error
from distcore_tasks.seq2seq.encode import encode_sources
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.shared.tokenized import TokenizedDatasets

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class UnlabeledSources:
    """Implements ``Dataset`` of ``distcore.plugin.task.task``."""

    sources: list[str]
    """The texts, without the prefix."""
    options: Seq2SeqOptions
    """Options of the training run."""
    data: TokenizedDatasets
    """The tokenizer and its padding token."""
    lengths: np.ndarray
    """Characters of each source. They serve to batch rows of like length, without tokenizing."""
    items: ConstantColumn
    """Ones."""

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` of the rows
        ``indices``, as ``PairDataset.batch`` does.
        """
        import torch

        texts = [self.sources[index] for index in indices]
        tokens = encode_sources(self.data.loaded_tokenizer, texts, self.options)
        padded = tokens.padded(np.arange(len(texts)), self.data.pad)
        names = ("input_ids", "attention_mask")
        return {
            name: torch.from_numpy(table.astype(np.int64))
            for name, table in zip(names, padded, strict=True)
        }


def unlabeled_sources(
    rows: FileRows, options: Seq2SeqOptions, data: TokenizedDatasets
) -> UnlabeledSources:
    """Return the sources of ``rows``. Raises DataError with file and row for an invalid one."""
    sources: list[Any] = []
    for number, (source,) in enumerate(rows.records, rows.start):
        if problem := text_problem(source, "source"):
            raise row_error(f"data file {rows.file}", number, problem)
        sources.append(source)
    lengths = np.fromiter(map(len, sources), np.int64, len(sources))
    items = ConstantColumn(len(lengths), 1)
    return UnlabeledSources(
        sources=sources, options=options, data=data, lengths=lengths, items=items
    )
