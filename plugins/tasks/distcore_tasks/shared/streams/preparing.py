"""Prepare a run that streams its training rows: check the options, choose the rows, and tell what they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from distcore import ConfigError
from distcore_data import source_digest
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.mixtures import mixed_sources
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import tokenizer_digest
from distcore_tasks.shared.sources import source_file
from distcore_tasks.shared.splits import Part, SourceRows, read_held_out
from distcore_tasks.shared.streams.datasets import Encode, encodable
from distcore_tasks.shared.streams.values import NumberedValues, save_values, split_values

R = TypeVar("R", bound=SourceRows)


def check_stream(options: TaskOptions, why_not: dict[str, str | bool]) -> None:
    """Raise ConfigError for options that a stream cannot have. ``why_not``: the problem of each, if it is set."""
    embedded = options.data in options.embedded and f"{options.data} comes with distcore and is no file"
    for key, problem in {"data": embedded, **why_not}.items():
        if problem:
            raise ConfigError(f"task_options.stream = true, {key}: {problem}")


@dataclass(frozen=True, slots=True)
class StreamParts(Generic[R]):
    """The rows of a run."""

    train: NumberedValues[Any]
    """The training rows."""
    held_out: dict[str, Part[R]]
    """The other datasets, by name."""

    def saved(self, folder: Path, encode: Encode, options: TaskOptions) -> StreamParts[R]:
        """Return the rows without bad ones, if they are passed over, and write to the new ``folder`` which they are."""
        train = encodable(self.train, encode) if options.skip_bad_rows else self.train
        save_values(train, folder)
        return replace(self, train=train)

    def sources(self, options: TaskOptions) -> list[int]:
        """Return the first training row of each source of a mixture, and the end of the last; empty without one."""
        named = [Path(source).expanduser() for source in mixed_sources(options)]
        return self.train.bounds(named) if named else []


def read_stream_parts(options: TaskOptions, rows: R, read: Callable[[str], R], seed: int) -> StreamParts[R]:
    """Choose the training rows. ``rows``: those of ``data``, by number. ``read`` returns the rows of another source.

    Raises DataError.
    """
    held_out = dict[str, Part[R]]()
    train = rows.values
    assert isinstance(train, NumberedValues)
    if options.eval_data is None:
        train, evaluation = split_values(train, options.eval_fraction, seed)
        held_out["evaluation"] = Part(rows, evaluation)
    return StreamParts(train, held_out | read_held_out(options, read))


def stream_digest(entry: Entry, options: TaskOptions, values: NumberedValues[Any], settings: Sequence[object]) -> str:
    """Return a digest of the source, of which rows are taken, and of what encodes them."""
    source = source_digest(source_file(options.data, options.embedded, options.filter))
    chosen = None if values.chosen is None else hashlib.sha256(values.chosen.bits.data).hexdigest()
    facts = [source, chosen, tokenizer_digest(entry.tokenizer), *settings]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
