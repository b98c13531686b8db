"""Tokenize checked rows, each of their texts alone, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.shared.jagged import Flat, flat_of
from distcore_tasks.shared.lazy_rows import LazyValues, Values
from distcore_tasks.shared.pretrained import check_vocabulary, load_tokenizer, set_pad_token
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.tokenize_rows import chunks, tokenize_chunk


def encode_some(
    options: EmbeddingOptions, tokenizer: Any, rows: Sequence[tuple[str, ...]], refuse: Refuse
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the tokens of the texts of each row."""
    for columns, _ in encode(rows, tokenizer, options):
        yield from (
            tuple(column.row(place) for column in columns)
            for place in range(len(columns[0].lengths))
        )


def make_tokenizer(options: EmbeddingOptions, train: Callable[[], Values[tuple[str, ...]]]) -> Any:
    """Return the model's tokenizer, or for a built-in model one that is trained on rows."""
    if not options.from_scratch:
        return set_pad_token(load_tokenizer(options.model, options.model_folder()))
    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    rows = train()
    texts = LazyValues(lambda: chain.from_iterable(rows), len(rows) * len(options.columns.names))
    return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))


def prepared_as(options: EmbeddingOptions) -> list[object]:
    """Return what changes texts before they are tokenized, for the key of a cache."""
    return [
        {role: options.prompt_texts[role] for role in options.columns.names},
        options.text_settings.lowers,
    ]


def encode(
    rows: Iterable[tuple[str, ...]], tokenizer: Any, options: EmbeddingOptions
) -> Iterator[tuple[list[Flat], int]]:
    """Yield the tokens of a chunk of rows, one ``Flat`` for each text of a row, and the
    number of texts cut.

    Raises ModelError for a token outside the model's vocabulary.
    """
    for some in chunks(rows):
        columns = [
            tokenize_chunk(
                tokenizer, [options.prepared(role, text) for text in texts], options.length
            )
            for role, texts in zip(options.columns.names, zip(*some, strict=True), strict=True)
        ]
        if not options.from_scratch:
            largest = max(int(tokens.values.max(initial=0)) for tokens in columns)
            check_vocabulary(options.model, options.model_folder(), largest)
        yield (
            [flat_of(tokens.values, tokens.lengths) for tokens in columns],
            sum(tokens.cut for tokens in columns),
        )
