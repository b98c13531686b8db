"""The datasets of text embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from distcore import Datasets
from distcore_tasks.shared.tokenized import TokenizedDatasets


@dataclass(frozen=True, kw_only=True)
class TextsDatasets(TokenizedDatasets):
    """Tokenized rows of texts with their tokenizer."""

    group: int
    """Rows of a global batch, in which an evaluation computes the loss."""


def texts_of(data: Datasets) -> TextsDatasets:
    """Return ``data`` with the type that ``prepare`` returns. Raises
    TypeError for other datasets.
    """
    if not isinstance(data, TextsDatasets):
        raise TypeError(f"expected the datasets of prepare(), not {type(data).__name__}")
    return data
