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
from distcore_tasks.shared.streams.held_out import is_large, token_counter
from distcore_tasks.shared.streams.preparing import Streaming, open_stream
from distcore_tasks.shared.streams.values import NumberedValues, save_values
from distcore_tasks.text_classification.dataset import TokenDataset, empty_dataset
from distcore_tasks.text_classification.encode import encode
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.rows import LabeledTexts, columns_of, schema_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedTexts(StreamedRows):
    """Texts with labels."""

    labels: Entries
    """Label of each row, encoded by the task's ``Problem``, ``(rows, …)``."""
    source: str
    """The source file, as the user named it."""
    columns: tuple[str, ...]
    """Columns of a record."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as ``TokenDataset`` does."""
        rows: TokenDataset = replace(
            self.stored(self.rows.at(indices)), labels=self.labels[indices]
        )
        return rows.batch(np.arange(len(indices)))

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each row, as ``TokenDataset`` does."""
        for row, record in self.rows.numbered():
            named = dict(zip(self.columns, record, strict=True))
            yield {"file": self.source, "row": row + 1} | (
                {"id": named["id"]} if "id" in named else {}
            )


def save_streams(
    folder: Path,
    parts: Mapping[str, LabeledPart[LabeledTexts]],
    tokenizer: Any,
    options: TextOptions,
) -> dict[str, Any]:
    """Write which rows are streamed, and their labels, to a cache entry. Return a
    part of its record.
    """
    encode_rows = partial(_encode, options, tokenizer)
    values = {name: _values(part) for name, part in parts.items()}
    streamed = {
        name: some
        for name, some in values.items()
        if some and (name == "train" or is_large(some, token_counter(encode_rows, _length)))
    }
    for name, some in streamed.items():
        save_values(some, folder / name)
        save_targets(folder / name, parts[name].labels)
    named = [Path(source).expanduser() for source in mixed_sources(options)]
    sources = streamed["train"].bounds(named) if named else []
    lengths = EncodedColumn(EncodedRows(streamed["train"], encode_rows), _length)
    return {"sources": sources, "sizes": mean_lengths(lengths, sources), "streamed": list(streamed)}


def _values(part: LabeledPart[LabeledTexts]) -> NumberedValues[Any] | None:
    """Return the records of a part by number; ``None`` for those of an embedded dataset."""
    values = part.rows.records.values if part.rows.records else None
    if not isinstance(values, NumberedValues):
        return None
    return values.only(
        part.numbers.blocks() if isinstance(part.numbers, ChosenRows) else [part.numbers]
    )


def open_streamed(
    entry: Entry, options: TextOptions, padding: Mapping[str, Any], name: str, source: str
) -> StreamedTexts:
    """Return a dataset of a cache entry. ``source`` names its source."""
    labels, digest = open_targets(entry.folder / name)
    streaming = Streaming(
        schema=schema_of(options.used_columns),
        make_tokenizer=lambda train: None,
        encode=partial(_encode, options),
        length=_length,
        settings=[options.max_seq_len, digest],
    )
    rows, content = open_stream(entry, options, streaming, name)
    return StreamedTexts(
        rows=rows,
        content=content,
        stored=partial(_stored, padding),
        labels=labels,
        source=source,
        columns=tuple(columns_of(options.used_columns)),
    )


def _encode(
    options: TextOptions, tokenizer: Any, records: Sequence[Any], refuse: Refuse
) -> Iterator[Encoded]:
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
    tokens, *types = (
        (flat_rows(part) for part in zip(*rows, strict=True)) if rows else [flat_rows([])]
    )
    return replace(
        empty_dataset(0),
        tokens=tokens,
        types=types[0] if types else None,
        lengths=tokens.lengths,
        items=np.ones(len(rows), np.int64),
        **padding,
    )
