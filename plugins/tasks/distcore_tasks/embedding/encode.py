"""Tokenize checked rows, each of their texts alone, in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.shared.jagged import Flat, flat_of
from distcore_tasks.shared.pretrained import check_vocabulary
from distcore_tasks.shared.tokenize_rows import chunks, tokenize_chunk


def encode(
    rows: Iterable[tuple[str, ...]], tokenizer: Any, options: EmbeddingOptions
) -> Iterator[tuple[list[Flat], int]]:
    """Yield the tokens of a chunk of rows, one ``Flat`` for each text of a row, and the number of texts cut.

    Raises ModelError for a token outside the model's vocabulary.
    """
    for some in chunks(rows):
        columns = [tokenize_chunk(tokenizer, list(texts), options.max_seq_len) for texts in zip(*some, strict=True)]
        if not options.from_scratch:
            largest = max(int(tokens.values.max(initial=0)) for tokens in columns)
            check_vocabulary(options.model, options.model_folder(), largest)
        yield [flat_of(tokens.values, tokens.lengths) for tokens in columns], sum(tokens.cut for tokens in columns)
