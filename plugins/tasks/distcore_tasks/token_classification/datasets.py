"""The datasets of token classification."""

from __future__ import annotations

from dataclasses import dataclass

from distcore import Datasets
from distcore_tasks.shared.tokenized import TokenizedDatasets
from distcore_tasks.token_classification.tags import Tag


@dataclass(frozen=True, kw_only=True)
class TagDatasets(TokenizedDatasets):
    """Tagged words with their tokenizer."""

    classes: tuple[str, ...]
    """Names of the tags in the order of class numbers."""
    labels: tuple[Tag, ...]
    """The tags in the data file: integers or strings."""


def tagged(data: Datasets) -> TagDatasets:
    """Return ``data`` with the type that ``prepare`` returns. Raises TypeError for others."""
    if not isinstance(data, TagDatasets):
        raise TypeError(f"expected the datasets of prepare(), found {type(data).__name__}")
    return data
