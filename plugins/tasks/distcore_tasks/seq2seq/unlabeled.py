"""Sources without targets, some rows of a file at a time; a rank tokenizes those that it reads, when it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import ConstantColumn, FileRows
from distcore.data import row_error
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
    """What the model was trained with."""
    data: TokenizedDatasets
    """The tokenizer, and the token to pad with."""
    lengths: np.ndarray
    """Characters of each source: enough to put rows of like length together, and known without tokenizing."""
    items: ConstantColumn
    """Ones."""

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` of the rows ``indices``, as ``PairDataset.batch`` does."""
        import torch

        texts = [self.sources[index] for index in indices]
        tokens = encode_sources(self.data.loaded_tokenizer, texts, self.options)
        padded = tokens.padded(np.arange(len(texts)), self.data.pad)
        names = ("input_ids", "attention_mask")
        return {name: torch.from_numpy(table.astype(np.int64)) for name, table in zip(names, padded, strict=True)}


def unlabeled_sources(rows: FileRows, options: Seq2SeqOptions, data: TokenizedDatasets) -> UnlabeledSources:
    """Return the sources of ``rows``; raises DataError, which names file and row, for one that cannot be used."""
    sources: list[Any] = []
    for number, (source,) in enumerate(rows.records, rows.start):
        if problem := text_problem(source, "source"):
            raise row_error(f"data file {rows.file}", number, problem)
        sources.append(source)
    lengths = np.fromiter(map(len, sources), np.int64, len(sources))
    items = ConstantColumn(len(lengths), 1)
    return UnlabeledSources(sources=sources, options=options, data=data, lengths=lengths, items=items)
