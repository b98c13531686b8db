"""Pairs that are read and tokenized when their step comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from distcore_tasks.seq2seq.dataset import PairDataset, pair_dataset
from distcore_tasks.seq2seq.encode import encode_some, make_tokenizer
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.rows import NAMES, schema_of
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.jagged import flat_of, flat_rows
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.streams.datasets import Encoded, StreamedRows, all_tokens
from distcore_tasks.shared.streams.preparing import EncodeBy, Streaming, open_rows


def streaming_of(options: Seq2SeqOptions) -> Streaming:
    """Return how pairs are streamed."""
    return Streaming(
        schema=schema_of(options.columns),
        make_tokenizer=partial(make_tokenizer, options),
        encode=partial(encode_some, options),
        length=all_tokens,
        settings=[
            options.prefix,
            options.max_seq_len,
            options.max_target_len,
            options.source_lang,
            options.target_lang,
        ],
    )


def open_streamed(entry: Entry, options: Seq2SeqOptions, name: str) -> StreamedRows:
    """Return a dataset of a cache entry; other rows than those for training have their texts."""
    streaming = streaming_of(options)
    if name != "train":
        streaming = replace(streaming, encode=partial(_with_texts, streaming.encode))
    return open_rows(
        entry, options, streaming, partial(_stored_pairs, int(entry.tokens["pad"])), name
    )


def _with_texts(
    encode: EncodeBy, tokenizer: Any, pairs: list[tuple[str, ...]], refuse: Refuse
) -> Iterator[Encoded]:
    """Yield the tokens of source and target of each pair, and their texts as bytes."""
    for pair, tokens in zip(pairs, encode(tokenizer, pairs, refuse), strict=True):
        yield (*tokens, *(np.frombuffer(text.encode(), np.uint8) for text in pair))


def _stored_pairs(pad: int, rows: Sequence[Encoded]) -> PairDataset:
    """Return the dataset of some pairs."""
    source, target = (flat_rows([row[part] for row in rows]) for part in (0, 1))
    parts = {
        name: [row[2 + part] for row in rows if len(row) > 2] for part, name in enumerate(NAMES)
    }
    texts = {
        name: flat_of(np.concatenate(some), np.array([*map(len, some)]))
        for name, some in parts.items()
        if some
    }
    return pair_dataset(source, target, texts, pad, "")
