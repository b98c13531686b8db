"""Where rows come from, for predictions: their file, their row there, and the user's id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np

from distcore_tasks.rows.lazy_table import StreamedTable
from distcore_tasks.rows.pipeline import BatchRows, RowPipeline
from distcore_tasks.rows.table import CachedTable, Table
from distcore_tasks.shared.streams.values import AT_ONCE

SOURCE_ROW, SOURCE_ID = "source_row", "source_id"
"""Columns of a stored table: the number of each row in its source, from 0, and its id as JSON."""
Origin = dict[str, object]
"""``file``, ``row`` (counted from 1) and, with a column of ids, ``id``."""


def origins_of(table: Table, pipeline: BatchRows, source: str) -> Iterator[Origin]:
    """Yield the origin of each row of a table.

    ``source``: the name of its source. Rows without one, and those of other pipelines, have empty
    origins.
    """
    if not source or not isinstance(pipeline, RowPipeline) or not pipeline.tells_origins:
        yield from repeat({}, len(table))
        return
    for number, named in _numbered(table, pipeline):
        yield {"file": source, "row": number + 1} | ({} if named is None else {"id": named})


def _numbered(table: Table, pipeline: RowPipeline[Any]) -> Iterator[tuple[int, int | str | None]]:
    """Yield the number of each row in its source, and its id."""
    if isinstance(table, StreamedTable):
        yield from _read(table, pipeline)
        return
    assert isinstance(table, CachedTable)
    rows = table.all()
    ids = rows.each(SOURCE_ID) if SOURCE_ID in table.columns else repeat(None)
    for number, named in zip(rows[SOURCE_ROW].tolist(), ids, strict=False):
        yield number, None if named is None else json.loads(named.tobytes())


def _read(
    table: StreamedTable, pipeline: RowPipeline[Any]
) -> Iterator[tuple[int, int | str | None]]:
    """Yield the same of streamed rows, which are read, and not encoded."""
    for start in range(0, len(table), AT_ONCE):
        places = np.arange(start, min(start + AT_ONCE, len(table)))
        numbers = table.values.numbers(places).tolist()
        yield from zip(numbers, map(pipeline.row_id, table.values.at(places)), strict=True)
