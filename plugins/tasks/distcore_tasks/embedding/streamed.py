"""Rows of texts that are read and tokenized when their step comes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distcore_tasks.embedding.dataset import TextsDataset
from distcore_tasks.embedding.encode import encode_some, make_tokenizer, prepared_as
from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.embedding.rows import schema_of
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.streams.datasets import Encoded, all_tokens
from distcore_tasks.shared.streams.preparing import Streaming


def streaming_of(options: EmbeddingOptions) -> Streaming:
    """Return how rows are streamed."""
    return Streaming(
        schema=schema_of(options.columns),
        make_tokenizer=partial(make_tokenizer, options),
        encode=partial(encode_some, options),
        length=all_tokens,
        settings=[options.columns.names, options.length, prepared_as(options)],
    )


def stored_texts(names: Sequence[str], pad: int, rows: Sequence[Encoded]) -> TextsDataset:
    """Return the dataset of some rows, whose texts are ``names``."""
    texts = {name: flat_rows([row[part] for row in rows]) for part, name in enumerate(names)}
    return TextsDataset(texts=texts, pad=pad, content="")
