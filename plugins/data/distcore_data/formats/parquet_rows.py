"""Rows of Parquet files, of which some are decoded at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data.formats.arrow_columns import (
    DECODED_ROWS,
    UNREADABLE,
    Chosen,
    records,
)
from distcore_data.formats.arrow_numbers import NumberedBatches
from distcore_data.formats.class_names import SCHEMA_KEY
from distcore_data.formats.columns import Columns, Record, RowError
from distcore_data.formats.opening import FileState, broken, need_pyarrow, state_of
from distcore_data.formats.places import START, Place

FILES, DECODED_BYTES = 256, 2**22
"""Most files of which rows are read by number that stay open, and most bytes of a row group."""
BUFFER = 2**22
"""Bytes of a column that are read at a time where a row group may be larger than memory."""
NO_PARQUET = "not a readable Parquet file: "


def read_parquet(path: Path, columns: Columns, place: Place = START) -> Iterator[Record | RowError]:
    """Yield the rows of a Parquet file from ``place`` on; after a row group that is damaged those
    of the next one.
    """
    name, start = f"data file {path}", place.row + 1
    file = _opened(name, path)
    import pyarrow as pa

    for group in range(place.part, file.num_row_groups):
        number = start
        start += file.metadata.row_group(group).num_rows
        try:
            for row in _group_records(name, file, group, number, columns):
                yield row
                number += 1
        except (pa.ArrowException, *UNREADABLE) as error:
            problem = broken(f"{name}, rows {number} to {start - 1}", error, NO_PARQUET)
            if not isinstance(problem, RowError):
                raise problem from None
            problem.rows = start - number
            yield problem


def _group_records(
    name: str, file: Any, group: int, start: int, columns: Columns
) -> Iterator[Record | RowError]:
    """Yield the rows of a row group, the first of number ``start``."""
    tops = _tops(name, file, columns)
    # ranks are forked: no threads
    for batch in file.iter_batches(
        DECODED_ROWS, row_groups=[group], columns=tops, use_threads=False
    ):
        yield from records(name, start, batch, Chosen.from_schema(name, batch.schema, columns))
        start += batch.num_rows


def parquet_batches(path: Path, columns: Columns) -> Iterator[Any]:
    """Yield some rows at a time of the columns of a Parquet file.

    Of what its schema says, the features of datasets stay, which name classes.
    """
    name = f"data file {path}"
    file = _opened(name, path, buffer_size=BUFFER)
    import pyarrow as pa

    tops = _tops(name, file, columns)
    kept = {
        key: value for key, value in (file.schema_arrow.metadata or {}).items() if key == SCHEMA_KEY
    }
    try:
        for batch in file.iter_batches(DECODED_ROWS, columns=tops, use_threads=False):
            yield batch.replace_schema_metadata(kept)
    except (pa.ArrowException, *UNREADABLE) as error:
        raise broken(name, error, NO_PARQUET) from None


def column_bytes(path: Path, columns: Columns) -> int:
    """Return the bytes of the columns of a Parquet file, decompressed, encoded as they are."""
    name = f"data file {path}"
    file = _opened(name, path)
    tops = set(_tops(name, file, columns))
    total = 0
    for group in range(file.num_row_groups):
        described = file.metadata.row_group(group)
        chunks = [described.column(number) for number in range(described.num_columns)]
        total += sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.path_in_schema.partition(".")[0] in tops
        )
    return total


def _tops(name: str, file: Any, columns: Columns) -> list[str]:
    """Return the names of the columns of the file that are read."""
    try:
        return list(dict.fromkeys(Chosen.from_schema(name, file.schema_arrow, columns).tops))
    except DataError as error:
        partitions = partition_columns(name.removeprefix("data file "))
        if absent := next((column for column in columns.values() if column in partitions), None):
            raise DataError(f"{name}: {partitioned(absent)}") from None
        raise error


def partition_columns(path: str) -> list[str]:
    """Return the columns that the names of the folders of a path have, as Hive and
    Spark write them: ``label=0``.
    """
    return [part.partition("=")[0] for part in Path(path).parts if re.fullmatch(r"\w+=.*", part)]


def partitioned(column: str) -> str:
    """Return the problem of a column that is in no file."""
    remedy = (
        "write the column into the files, such as by pyarrow.dataset.dataset(DATA,"
        " partitioning='hive')"
    )
    return (
        f"the column {column!r} is in the names of its folders ({column}=…), which are not read;"
        f" {remedy}"
    )


def parquet_columns(path: Path) -> list[str]:
    """Return the names of the columns of a file."""
    return list(_opened(f"data file {path}", path).schema_arrow.names)


def group_rows(path: Path) -> list[int]:
    """Return the number of rows of each row group of a Parquet file."""
    file = _opened(f"data file {path}", path)
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def take_parquet(
    path: Path, columns: Columns, parts: np.ndarray, rows: np.ndarray
) -> list[Record] | None:
    """Return some rows of a Parquet file whose groups are small, and stay
    decoded; ``None`` as ``take_arrow``.
    """
    import pyarrow as pa

    try:
        file, numbered = _numbered(path, tuple(columns.items()), state_of(path))
        if any(
            file.metadata.row_group(part).total_byte_size > DECODED_BYTES
            for part in set(parts.tolist())
        ):
            return None
        return numbered.take(parts, rows)
    except (pa.ArrowException, IndexError, *UNREADABLE):
        return None


@lru_cache(maxsize=FILES)
def _numbered(
    path: Path, asked: tuple[tuple[str, str], ...], state: FileState
) -> tuple[Any, NumberedBatches]:
    """Return the open file, and its groups as batches."""
    import pyarrow as pa

    name, columns = f"data file {path}", dict(asked)
    file = _opened(name, path)
    tops = _tops(name, file, columns)
    schema = pa.schema([file.schema_arrow.field(top) for top in tops], file.schema_arrow.metadata)

    def group(number: int) -> Any:
        table = file.read_row_group(number, columns=tops, use_threads=False).select(tops)
        return table.combine_chunks().to_batches()[0]

    return file, NumberedBatches(group, Chosen.from_schema(name, schema, columns))


def _opened(name: str, path: Path, buffer_size: int = 0) -> Any:
    need_pyarrow(name)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=buffer_size)
    except (pa.ArrowException, *UNREADABLE) as error:
        raise broken(name, error, NO_PARQUET) from None
