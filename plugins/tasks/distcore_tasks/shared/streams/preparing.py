"""Prepare a run that streams its training rows: check the options, choose the rows, and tell what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from distcore import ConfigError
from distcore_data import source_digest
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.mixtures import mixed_sources
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import load_tokenizer, tokenizer_digest
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows, stream_rows
from distcore_tasks.shared.sources import source_file
from distcore_tasks.shared.splits import Part, Refuse, SourceRows, read_held_out
from distcore_tasks.shared.streams.datasets import (
    Encoded,
    EncodedColumn,
    EncodedRows,
    StreamedRows,
    encodable,
    mean_lengths,
)
from distcore_tasks.shared.streams.values import NumberedValues, open_values, save_values, split_values

R = TypeVar("R", bound=SourceRows)
EncodeBy = Callable[[Any, list[Any], Refuse], Iterable[Encoded]]
"""Encode values with a tokenizer, in the form of ``datasets.Encode``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """How a task streams its rows."""

    schema: Schema[Any]
    """What is read of a row."""
    make_tokenizer: Callable[[Callable[[], Iterable[Any]]], Any]
    """Return the tokenizer, which may be trained on the values that the argument returns."""
    encode: EncodeBy
    """Encodes values."""
    length: Callable[[Encoded], int]
    """Return the tokens that a row reads."""
    settings: Sequence[object]
    """Everything else on which encoded rows depend."""
    load_tokenizer: Callable[[str, Path], Any] = load_tokenizer
    """Load the saved tokenizer of a model."""


def check_stream(options: TaskOptions, why_not: dict[str, str | bool]) -> None:
    """Raise ConfigError for options that a stream cannot have. ``why_not``: the problem of each, if it is set."""
    embedded = options.data in options.embedded and f"{options.data} comes with distcore and is no file"
    for key, problem in {"data": embedded, **why_not}.items():
        if problem:
            raise ConfigError(f"task_options.stream = true, {key}: {problem}")


@dataclass(frozen=True, slots=True)
class StreamParts(Generic[R]):
    """The rows of a run."""

    tokenizer: Any
    """The tokenizer."""
    train: NumberedValues[Any]
    """The training rows."""
    held_out: dict[str, Part[R]]
    """The other datasets, by name."""
    record: dict[str, Any]
    """``sources`` and ``sizes`` of the cache entry."""


def read_stream_parts(
    options: TaskOptions, streaming: Streaming, rows: R, read: Callable[[str], R], seed: int, folder: Path
) -> StreamParts[R]:
    """Choose the training rows, and write which they are to the new ``folder``. Raises DataError.

    ``rows``: those of ``data``, by number. ``read`` returns the rows of another source.
    """
    held_out = dict[str, Part[R]]()
    train = rows.values
    assert isinstance(train, NumberedValues)
    if options.eval_data is None:
        train, evaluation = split_values(train, options.eval_fraction, seed)
        held_out["evaluation"] = Part(rows, evaluation)
    held_out |= read_held_out(options, read)
    tokenizer = streaming.make_tokenizer(train.sample)
    encoded = partial(streaming.encode, tokenizer)
    train = encodable(train, encoded) if options.skip_bad_rows else train
    save_values(train, folder)
    named = [Path(source).expanduser() for source in mixed_sources(options)]
    sources = train.bounds(named) if named else []
    sizes = mean_lengths(EncodedColumn(EncodedRows(train, encoded), streaming.length), sources)
    return StreamParts(tokenizer, train, held_out, {"sources": sources, "sizes": sizes})


def stream_parts(
    options: TaskOptions, streaming: Streaming, read: Callable[[str], Rows[Any]], seed: int, folder: Path
) -> StreamParts[Rows[Any]]:
    """Return the result of ``read_stream_parts`` for the rows of ``data``."""
    source = source_file(options.data, options.embedded, options.filter)
    rows = stream_rows(source, streaming.schema, options.skip_bad_rows)
    return read_stream_parts(options, streaming, rows, read, seed, folder)


def open_rows(
    entry: Entry, options: TaskOptions, streaming: Streaming, stored: Callable[[Sequence[Encoded]], Any]
) -> StreamedRows:
    """Return the training rows of a cache entry. ``stored`` returns the dataset of some of them in memory."""
    rows, content = open_stream(entry, options, streaming)
    return StreamedRows(rows=rows, content=content, stored=stored)


def open_stream(entry: Entry, options: TaskOptions, streaming: Streaming) -> tuple[EncodedRows, str]:
    """Return the training rows of a cache entry, and a digest of them."""
    source = source_file(options.data, options.embedded, options.filter)
    values = open_values(source, streaming.schema, entry.folder / "train")
    rows = EncodedRows(values, partial(streaming.encode, streaming.load_tokenizer(options.model, entry.tokenizer)))
    return rows, _digest(entry, options, values, streaming.settings)


def _digest(entry: Entry, options: TaskOptions, values: NumberedValues[Any], settings: Sequence[object]) -> str:
    """Return a digest of the source, of which rows are taken, and of what encodes them."""
    source = source_digest(source_file(options.data, options.embedded, options.filter))
    chosen = None if values.chosen is None else hashlib.sha256(values.chosen.bits.data).hexdigest()
    facts = [source, chosen, tokenizer_digest(entry.tokenizer), *settings]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
