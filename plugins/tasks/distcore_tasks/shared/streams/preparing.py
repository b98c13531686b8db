"""Prepare a run that streams its rows: check the options, choose the rows, and
tell what they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from distcore import ConfigError
from distcore_data import Source, source_digest
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.mixtures import mixed_sources
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import load_tokenizer, tokenizer_digest
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.sources import source_file
from distcore_tasks.shared.splits import Part, Refuse, SourceRows, read_held_out
from distcore_tasks.shared.streams.datasets import (
    Encoded,
    EncodedColumn,
    EncodedRows,
    encodable,
    mean_lengths,
)
from distcore_tasks.shared.streams.held_out import is_large, token_counter, values_of
from distcore_tasks.shared.streams.values import (
    NumberedValues,
    open_values,
    save_values,
    split_values,
)

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
    refuses: bool = True
    """False if ``encode`` refuses no value."""


def check_stream(options: TaskOptions, why_not: dict[str, str | bool]) -> None:
    """Raise ConfigError for options that a stream cannot have. ``why_not``: the problem of
    each, if it is set.
    """
    embedded = (
        options.data in options.embedded and f"{options.data} comes with distcore and is no file"
    )
    for key, problem in {"data": embedded, **why_not}.items():
        if problem:
            raise ConfigError(f"task_options.stream = true, {key}: {problem}")


@dataclass(frozen=True, slots=True)
class StreamParts(Generic[R]):
    """The rows of a run."""

    tokenizer: Any
    """The tokenizer."""
    rows: dict[str, int]
    """Number of rows of each dataset, by name."""
    held_out: dict[str, Part[R]]
    """The datasets beside the training rows that are stored, by name."""
    record: dict[str, Any]
    """``sources``, ``sizes`` and ``streamed`` of the cache entry."""


def read_stream_parts(
    options: TaskOptions,
    streaming: Streaming,
    rows: R,
    read: Callable[[str], R],
    seed: int,
    folder: Path,
) -> StreamParts[R]:
    """Choose the rows of all datasets, and write which are streamed to the
    new cache entry ``folder``.

    ``rows``: those of ``data``, by number. ``read`` returns the rows of
    another source. Raises DataError.
    """
    parts = dict[str, Part[R]]()
    train = rows.values
    assert isinstance(train, NumberedValues)
    if options.eval_data is None:
        train, evaluation = split_values(train, options.eval_fraction, seed)
        parts["evaluation"] = Part(rows, evaluation)
    parts |= read_held_out(options, read)
    tokenizer = streaming.make_tokenizer(train.sample)
    encoded = partial(streaming.encode, tokenizer)
    streamed, held_out = {"train": train}, dict[str, Part[R]]()
    for name, part in parts.items():
        values = values_of(part)
        if values and is_large(values, token_counter(encoded, streaming.length)):
            streamed[name] = values
        else:
            held_out[name] = part
    if options.skip_bad_rows and streaming.refuses:
        streamed = {name: encodable(values, encoded) for name, values in streamed.items()}
    for name, values in streamed.items():
        save_values(values, folder / name)
    named = [Path(source).expanduser() for source in mixed_sources(options)]
    sources = streamed["train"].bounds(named) if named else []
    sizes = mean_lengths(
        EncodedColumn(EncodedRows(streamed["train"], encoded), streaming.length), sources
    )
    counts = {
        name: len(streamed.get(name, ())) or len(parts[name].numbers) for name in ("train", *parts)
    }
    return StreamParts(
        tokenizer,
        counts,
        held_out,
        {"sources": sources, "sizes": sizes, "streamed": list(streamed)},
    )


def open_sets(
    entry: Entry, stored: Callable[[str], Any], streamed: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the datasets of a cache entry by name, each opened as it is kept."""
    return {name: (streamed if name in entry.streamed else stored)(name) for name in entry.facts}


def open_stream(
    entry: Entry, options: TaskOptions, streaming: Streaming, name: str
) -> tuple[EncodedRows, str]:
    """Return the rows of a dataset of a cache entry, and a digest of them."""
    source = source_file(options.sources[name], options.embedded, options.filter)
    values = open_values(source, streaming.schema, entry.folder / name)
    rows = EncodedRows(
        values, partial(streaming.encode, streaming.load_tokenizer(options.model, entry.tokenizer))
    )
    return rows, _digest(entry, source, values, streaming.settings)


def _digest(
    entry: Entry, source: Source, values: NumberedValues[Any], settings: Sequence[object]
) -> str:
    """Return a digest of the source, of which rows are taken, and of what encodes them."""
    chosen = None if values.chosen is None else hashlib.sha256(values.chosen.bits.data).hexdigest()
    facts = [source_digest(source), chosen, tokenizer_digest(entry.tokenizer), *settings]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
