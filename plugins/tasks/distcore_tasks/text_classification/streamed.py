"""Texts that are read and tokenized when their step comes. Their labels alone are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_data import ChosenRows
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.classification.coded import open_targets, save_targets
from distcore_tasks.shared.classification.parts import LabeledPart
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.mixtures import mixed_sources
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.shared.streams.datasets import (
    Encoded,
    EncodedColumn,
    EncodedRows,
    StreamedRows,
    mean_lengths,
)
from distcore_tasks.shared.streams.preparing import Streaming, open_stream
from distcore_tasks.shared.streams.values import NumberedValues, save_values
from distcore_tasks.text_classification.dataset import TokenDataset, empty_dataset
from distcore_tasks.text_classification.encode import encode
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.rows import LabeledTexts, schema_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedTexts(StreamedRows):
    """Texts with labels."""

    labels: Entries
    """Label of each row, encoded by the task's ``Problem``, ``(rows, …)``."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as ``TokenDataset`` does."""
        rows: TokenDataset = replace(self.stored(self.rows.at(indices)), labels=self.labels[indices])
        return rows.batch(np.arange(len(indices)))


def save_stream(folder: Path, part: LabeledPart[LabeledTexts], tokenizer: Any, options: TextOptions) -> dict[str, Any]:
    """Write which rows are trained on, and their labels, to the new ``folder``. Return a part of the entry's record."""
    records = part.rows.records
    assert records
    assert isinstance(records.values, NumberedValues)
    assert isinstance(part.numbers, ChosenRows)
    train = records.values.only(part.numbers.blocks())
    save_values(train, folder)
    save_targets(folder, part.labels)
    named = [Path(source).expanduser() for source in mixed_sources(options)]
    sources = train.bounds(named) if named else []
    lengths = EncodedColumn(EncodedRows(train, partial(_encode, options, tokenizer)), _length)
    return {"sources": sources, "sizes": mean_lengths(lengths, sources)}


def open_streamed(entry: Entry, options: TextOptions, padding: Mapping[str, Any]) -> StreamedTexts:
    """Return the training rows of a cache entry."""
    labels, digest = open_targets(entry.folder / "train")
    streaming = Streaming(
        schema=schema_of(options.used_columns),
        make_tokenizer=lambda train: None,
        encode=partial(_encode, options),
        length=_length,
        settings=[options.max_seq_len, digest],
    )
    rows, content = open_stream(entry, options, streaming)
    return StreamedTexts(rows=rows, content=content, stored=partial(_stored, padding), labels=labels)


def _encode(options: TextOptions, tokenizer: Any, records: Sequence[Any], refuse: Refuse) -> Iterator[Encoded]:
    """Yield the tokens of each row and, if the model takes them, their types."""
    if records:
        seconds = [str(record[1]) for record in records] if options.used_columns.text_pair else None
        encoded = encode(tokenizer, [str(record[0]) for record in records], seconds, options)
        flats = [flat for flat in (encoded.tokens, encoded.types) if flat is not None]
        yield from (tuple(flat.row(place) for flat in flats) for place in range(len(records)))


def _length(row: Encoded) -> int:
    return len(row[0])


def _stored(padding: Mapping[str, Any], rows: Sequence[Encoded]) -> TokenDataset:
    """Return the dataset of some rows, without labels."""
    tokens, *types = (flat_rows(part) for part in zip(*rows, strict=True)) if rows else [flat_rows([])]
    return replace(
        empty_dataset(0),
        tokens=tokens,
        types=types[0] if types else None,
        lengths=tokens.lengths,
        items=np.ones(len(rows), np.int64),
        **padding,
    )
