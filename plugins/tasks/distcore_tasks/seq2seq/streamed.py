"""Pairs that are read and tokenized when their step comes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distcore_tasks.seq2seq.dataset import PairDataset, pair_dataset
from distcore_tasks.seq2seq.encode import encode_some, make_tokenizer
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.rows import schema_of
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.streams.datasets import Encoded, all_tokens
from distcore_tasks.shared.streams.preparing import Streaming


def streaming_of(options: Seq2SeqOptions) -> Streaming:
    """Return how pairs are streamed."""
    return Streaming(
        schema=schema_of(options.columns),
        make_tokenizer=partial(make_tokenizer, options),
        encode=partial(encode_some, options),
        length=all_tokens,
        settings=[options.prefix, options.max_seq_len, options.max_target_len],
    )


def stored_pairs(pad: int, rows: Sequence[Encoded]) -> PairDataset:
    """Return the dataset of some pairs."""
    source, target = (flat_rows([row[part] for row in rows]) for part in (0, 1))
    return pair_dataset(source, target, {}, pad, "")
