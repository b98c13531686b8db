"""Prepare a run that streams its rows: check the options, choose the rows, and
tell what they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distcore import ConfigError
from distcore_data import Source, source_digest
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import load_tokenizer, tokenizer_digest
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.sources import source_file
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.streams.datasets import (
    Encoded,
    EncodedRows,
)
from distcore_tasks.shared.streams.values import (
    NumberedValues,
    open_values,
)

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
