"""The datasets of text classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distcore_tasks.rows.prepare import prepare_rows
from distcore_tasks.shared.padding import check_padding
from distcore_tasks.shared.pretrained import check_length
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.tokenized import TokenizedDatasets
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.other_tasks import naming_other_tasks
from distcore_tasks.text_classification.rows import LabeledRows, check_embedded

if TYPE_CHECKING:
    from distcore import Datasets, RunConfig


@dataclass(frozen=True, kw_only=True)
class TextDatasets(TokenizedDatasets):
    """Tokenized texts with their classes and tokenizer."""

    classes: tuple[str, ...]
    """Class names in the order of class numbers; empty for a regression."""
    labels: tuple[int | str, ...]
    """Labels of the classes in predictions: as in the data file, or ``class_names``."""


def prepare_text(options: TextOptions, config: RunConfig) -> TextDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    Raises DataError, ModelError or ConfigError.
    """
    if not options.from_scratch:
        check_length(options.model, options.model_folder(), options.max_seq_len)
        check_padding(options)
    if options.stream:
        check_stream(options, {})
    check_embedded(options)
    with naming_other_tasks():
        return prepare_rows(LabeledRows(options), config, TextDatasets)


def texts_of(data: Datasets) -> TextDatasets:
    """Return ``data`` with the type that ``prepare`` returns. Raises TypeError for others."""
    if not isinstance(data, TextDatasets):
        raise TypeError(f"expected the datasets of prepare(), found {type(data).__name__}")
    return data
