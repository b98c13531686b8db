"""Tagged words that are read and tokenized when their step comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.lazy_rows import LazyValues, Values
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.streams.datasets import Encoded, StreamedRows
from distcore_tasks.shared.streams.preparing import Streaming, open_stream
from distcore_tasks.token_classification.dataset import TaggedDataset, tagged_dataset, token_labels
from distcore_tasks.token_classification.encode import (
    Words,
    check_judged,
    load_words_tokenizer,
    tokenize_words,
)
from distcore_tasks.token_classification.options import TagOptions
from distcore_tasks.token_classification.rows import encode_tags, schema_of


def streaming_of(options: TagOptions, classes: Sequence[str]) -> Streaming:
    """Return how rows are streamed, whose tags are ``classes``."""
    return Streaming(
        schema=schema_of(options.columns),
        make_tokenizer=partial(make_tokenizer, options),
        encode=partial(encode_some, options, classes),
        length=_length,
        settings=[options.max_seq_len, *classes],
        load_tokenizer=load_words_tokenizer,
    )


def encode_some(
    options: TagOptions,
    classes: Sequence[str],
    tokenizer: Any,
    records: Sequence[Any],
    refuse: Refuse,
) -> Iterator[Encoded]:
    """Yield tokens, starts of words, classes, and number of words of each row."""
    rows = list(encode_tags(records, classes, refuse))
    if rows:
        words = tokenize_words(tokenizer, [row for row, _ in rows], options.max_seq_len)
        check_judged(words, refuse, 0, options)
        labels = token_labels(words, [tags for _, tags in rows])
        for place in range(len(rows)):
            yield (
                *(flat.row(place) for flat in (words.tokens, words.begins, labels)),
                words.count[place : place + 1],
            )


def make_tokenizer(options: TagOptions, train: Callable[[], Values[Any]]) -> Any:
    """Return the model's tokenizer, or for a built-in model one that is trained on rows."""
    if not options.from_scratch:
        return load_words_tokenizer(options.model, options.model_folder())
    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    rows = train()
    texts = LazyValues(lambda: (" ".join(words) for words, *_ in rows), len(rows))
    return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedWords(StreamedRows):
    """Tagged words with their origin."""

    source: str
    """The source, as the user named it."""

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each row, as ``TaggedDataset`` does."""
        for row, (_, _, *named) in self.rows.numbered():
            yield {"file": self.source, "row": row + 1} | ({"id": named[0]} if named else {})


def open_streamed(
    entry: Entry, options: TagOptions, classes: Sequence[str], pad: int, name: str, source: str
) -> StreamedWords:
    """Return a dataset of a cache entry. ``source`` names its source."""
    rows, content = open_stream(entry, options, streaming_of(options, classes), name)
    return StreamedWords(
        rows=rows, content=content, stored=partial(stored_words, pad), source=source
    )


def stored_words(pad: int, rows: Sequence[Encoded]) -> TaggedDataset:
    """Return the dataset of some rows."""
    tokens, begins, labels = (flat_rows([row[part] for row in rows]) for part in range(3))
    count = np.concatenate([np.empty(0, np.int64), *(row[3] for row in rows)])
    return tagged_dataset(Words(tokens=tokens, begins=begins, count=count), labels, pad, "")


def _length(row: Encoded) -> int:
    return len(row[0])
