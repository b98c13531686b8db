"""Rows of Parquet files and of Arrow files, of which some are decoded at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distcore import DataError
from distcore_data.formats.columns import (
    NOTHING,
    Columns,
    Record,
    RowError,
    dotted,
    inside,
    missing,
    position,
    row_error,
    until_cut,
)
from distcore_data.formats.opening import broken, need_pyarrow, reason
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_limit import most_bytes, over_limit

DECODED_ROWS = 1024
"""Rows of a Parquet or an Arrow file that are decoded at a time."""
NEAR = 16
"""Rows that are read together if one of them is asked for by number, of files that are read at any row."""
FEW = 256
"""Most batches of a mapped file that are kept opened."""
MAPPED, DECODED_BYTES = 16, 2**22
"""Most files, and row groups, of which rows are read by number that stay in memory; most bytes of such a group."""
UNREADABLE = (OSError, KeyError, ValueError, OverflowError)
"""Other exceptions of pyarrow: for two columns of one name, invalid UTF-8, impossible dates."""
BUFFER = 2**22
"""Bytes of a column that are read at a time where a row group may be larger than memory."""
NO_PARQUET = "not a readable Parquet file: "
FILE, END = b"ARROW1", b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The first bytes of a file with an index of its batches, and the last ones of a stream, which has none."""


def read_parquet(path: Path, columns: Columns, place: Place = START) -> Iterator[Record | RowError]:
    """Yield the rows of a Parquet file from ``place`` on; after a row group that is damaged those of the next one."""
    name, start = f"data file {path}", place.row + 1
    file = _parquet(name, path)
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


def parquet_batches(path: Path, columns: Columns) -> Iterator[Any]:
    """Yield some rows at a time of the columns of a Parquet file, without what its schema says of them."""
    name = f"data file {path}"
    file = _parquet(name, path, buffer_size=BUFFER)
    import pyarrow as pa

    there = file.schema_arrow.names
    tops = list(dict.fromkeys(there[position(name, there, setting, columns)] for setting in columns))
    try:
        for batch in file.iter_batches(DECODED_ROWS, columns=tops, use_threads=False):
            yield batch.replace_schema_metadata(None)
    except (pa.ArrowException, *UNREADABLE) as error:
        raise broken(name, error, NO_PARQUET) from None


def _parquet(name: str, path: Path, buffer_size: int = 0) -> Any:
    need_pyarrow(name)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=buffer_size)
    except (pa.ArrowException, *UNREADABLE) as error:
        raise broken(name, error, NO_PARQUET) from None


def group_rows(path: Path) -> list[int]:
    """Return the number of rows of each row group of a Parquet file."""
    file = _parquet(f"data file {path}", path)
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def _group_records(name: str, file: Any, group: int, start: int, columns: Columns) -> Iterator[Record | RowError]:
    """Yield the rows of a row group, the first of number ``start``."""
    there = file.schema_arrow.names
    tops = [there[position(name, there, setting, columns)] for setting in columns]
    chosen = {"row_groups": [group], "columns": list(dict.fromkeys(tops))}
    for batch in file.iter_batches(DECODED_ROWS, use_threads=False, **chosen):  # ranks are forked: no threads
        yield from _records(name, start, [batch.column(top) for top in tops], tops, columns, [[]] * len(tops))
        start += batch.num_rows


def _records(
    name: str, start: int, arrays: list[Any], tops: list[str], columns: Columns, classes: list[list[str]]
) -> Iterator[Record | RowError]:
    """Yield the rows of Arrow columns, the first of number ``start``; each alone if some cannot be decoded."""
    try:
        if (
            size := sum(array.nbytes for array in arrays)
        ) > most_bytes():  # of many rows perhaps, which are tried alone
            raise row_error(name, start, over_limit(size))
        values = [
            _with_class_names(name, start, _values(name, array, top, setting, columns), names)
            for array, top, setting, names in zip(arrays, tops, columns, classes, strict=True)
        ]
    except (RowError, *UNREADABLE) as error:
        if len(arrays[0]) == 1:
            yield error if isinstance(error, RowError) else row_error(name, start, reason(error))
            return
        for row in range(len(arrays[0])):
            alone = [array.slice(row, 1) for array in arrays]
            yield from _records(name, start + row, alone, tops, columns, classes)
    else:
        yield from zip(*values, strict=True)


def _values(name: str, column: Any, top: str, setting: str, columns: Columns) -> list[Any]:
    """Return the values of an Arrow column or, where ``setting`` names a column inside ``top``, of that one."""
    values: list[Any] = column.to_pylist()
    if columns[setting] == top:
        return values
    chosen = [inside(value, columns[setting].split(".")[1:]) for value in values]
    if NOTHING in chosen:
        row = {top: values[chosen.index(NOTHING)]}
        raise DataError(f"{name}: {missing(setting, dotted(row), columns)}")
    return chosen


def read_arrow_file(
    path: Path, columns: Columns, place: Place = START, wanted: Container[int] | None = None
) -> Iterator[Record | RowError]:
    """Yield the rows of one Arrow file from ``place`` on.

    With ``wanted``, for a few rows, few are decoded at a time, and the file stays mapped for the next call.
    """
    name = f"data file {path}"
    need_pyarrow(name)
    if wanted is None or _is_cut(path):
        return _read_arrow(name, path, columns, place, "")
    return near_rows(name, path, columns, place)


def _is_cut(path: Path) -> bool:
    """Return True for a stream that ends before its end mark: it cannot be mapped as a whole."""
    stat = path.stat()
    return not _whole(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def _whole(path: Path, *state: int) -> bool:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        return is_whole(mapped.read_buffer())


def _all(content: Any) -> Any:
    return content


def near_rows(
    name: str, path: Path, columns: Columns, place: Place, part: Callable[[Any], Any] = _all
) -> Iterator[Record | RowError]:
    """Yield the rows of a file that stays mapped. ``part`` returns what of its content is in the Arrow format."""
    import pyarrow as pa

    try:
        stat = path.stat()
        reader = _mapped(path, part, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        yield from _reader_records(name, reader, columns, place, NEAR)
    except (pa.ArrowException, EOFError, *UNREADABLE) as error:
        raise broken(name, error, "cannot be read: ") from None


def take_arrow(
    name: str, path: Path, columns: Columns, parts: np.ndarray, rows: np.ndarray, part: Callable[[Any], Any] = _all
) -> list[Record] | None:
    """Return some rows of a file that stays mapped; ``None`` if one cannot be read so.

    ``parts``, ascending, and ``rows``: the batch of each, and its number from there on, int64 ``(n,)``.
    """
    import pyarrow as pa

    try:
        stat = path.stat()
        reader = _mapped(path, part, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return _taken(name, reader.schema, _inside(reader.get_batch, parts, rows), columns, is_named=True)
    except (pa.ArrowException, EOFError, *UNREADABLE):
        return None


def take_parquet(path: Path, columns: Columns, parts: np.ndarray, rows: np.ndarray) -> list[Record] | None:
    """Return some rows of a Parquet file whose groups are small, and stay decoded; ``None`` as ``take_arrow``."""
    import pyarrow as pa

    name = f"data file {path}"
    try:
        stat = path.stat()
        state = stat.st_ino, stat.st_size, stat.st_mtime_ns
        file = _parquet_file(path, *state)
        there = file.schema_arrow.names
        tops = tuple(dict.fromkeys(there[position(name, there, setting, columns)] for setting in columns))
        most = max(file.metadata.row_group(group).total_byte_size for group in set(parts.tolist()))
        if most > DECODED_BYTES:
            return None
        batches = _inside(lambda group: _group(path, group, tops, *state), parts, rows)
        return _taken(name, file.schema_arrow, batches, columns, is_named=False)
    except (pa.ArrowException, *UNREADABLE):
        return None


@lru_cache(maxsize=MAPPED)
def _parquet_file(path: Path, *state: int) -> Any:
    return _parquet(f"data file {path}", path)


@lru_cache(maxsize=MAPPED)
def _group(path: Path, group: int, tops: tuple[str, ...], *state: int) -> Any:
    table = _parquet_file(path, *state).read_row_group(group, columns=list(tops), use_threads=False)
    return table.combine_chunks()


def _inside(get: Callable[[int], Any], parts: np.ndarray, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield batches with the rows in them. A row may be in a later one than its own."""
    for part in np.unique(parts).tolist():
        number, left = part, rows[parts == part]
        while len(left):
            batch = get(number)
            here = left < batch.num_rows
            if here.any():
                yield batch, left[here]
            number, left = number + 1, left[~here] - batch.num_rows


def _taken(
    name: str, schema: Any, batches: Iterable[tuple[Any, np.ndarray]], columns: Columns, *, is_named: bool
) -> list[Record] | None:
    import pyarrow as pa

    taken = list[Record]()
    for batch, rows in batches:
        there = batch.schema.names
        tops = [there[position(name, there, setting, columns)] for setting in columns]
        classes = [arrow_class_names(schema, column) if is_named else [] for column in columns.values()]
        arrays = [batch.column(top).take(pa.array(rows)) for top in tops]
        for row in _records(name, 1, arrays, tops, columns, classes):
            if isinstance(row, RowError):
                return None
            taken.append(row)
    return taken


@lru_cache(maxsize=MAPPED)
def _mapped(path: Path, part: Callable[[Any], Any], *state: int) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        reader = _opened(part(mapped.read_buffer()))
    if hasattr(reader, "get_batch") and reader.num_record_batches > FEW:
        return reader
    batches = [*_batches(reader)]
    if part is not _all and sum(batch.nbytes for batch in batches) <= DECODED_BYTES:  # whose rows are counted as one
        batches = pa.Table.from_batches(batches, reader.schema).combine_chunks().to_batches()
    return _Listed(reader.schema, batches)


class _Listed(NamedTuple):
    """The batches of a stream, with the names of those of a file."""

    schema: Any
    batches: list[Any]

    @property
    def num_record_batches(self) -> int:
        return len(self.batches)

    def get_batch(self, number: int) -> Any:
        return self.batches[number]


def read_arrow_files(name: str, files: Iterable[Path], columns: Columns) -> Iterator[Record | RowError]:
    """Yield the rows of several Arrow files, which are together the source ``name``."""
    start = 1
    for path in files:
        for row in until_cut(_read_arrow(name, path, columns, Place(start - 1), f"{path} ")):
            yield row
            start += 1


def batch_rows(path: Path) -> list[int]:
    """Return the number of rows of each batch of an Arrow file."""
    need_pyarrow(f"data file {path}")
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as mapped:
            return [batch.num_rows for batch in _batches(_opened(mapped.read_buffer()))]
    except (pa.ArrowException, EOFError, *UNREADABLE) as error:
        raise broken(f"data file {path}", error, "cannot be read: ") from None


def _read_arrow(name: str, path: Path, columns: Columns, place: Place, where: str) -> Iterator[Record | RowError]:
    """Yield the rows of a memory-mapped file from ``place`` on; other columns stay on the disk."""
    import pyarrow as pa

    number = place.row + place.inner + 1
    try:
        with pa.memory_map(str(path)) as mapped:
            content = mapped.read_buffer()
            for record in arrow_records(name, content, columns, place):
                yield record
                number += 1
            if not is_whole(content):
                raise EOFError("it ends without the end mark of Arrow, so a part is missing: write or fetch it again")
    except (pa.ArrowException, EOFError, *UNREADABLE) as error:
        after = f" after row {number - 1}" if number > 1 else ""
        raise broken(name, error, f"{where}cannot be read{after}: ") from None


def is_whole(content: Any) -> bool:
    """Return True for a file, whose index was at its end, and for a stream with its end mark."""
    return bool(content[: len(FILE)].to_pybytes() == FILE or content[-len(END) :].to_pybytes() == END)


def _opened(content: Any) -> Any:
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False)  # as for Parquet
    indexed = content[: len(FILE)].to_pybytes() == FILE
    return (pa.ipc.open_file if indexed else pa.ipc.open_stream)(content, options=options)


def _batches(reader: Any, first: int = 0) -> Iterator[Any]:
    """Yield the batches of a file, or of a stream, which has no index of them."""
    if hasattr(reader, "get_batch"):
        return map(reader.get_batch, range(first, reader.num_record_batches))
    return islice(reader, first, None)


def arrow_records(name: str, content: Any, columns: Columns, place: Place = START) -> Iterator[Record | RowError]:
    """Yield the rows in a buffer of the Arrow file or stream format, from ``place`` on."""
    return _reader_records(name, _opened(content), columns, place, DECODED_ROWS)


def _reader_records(
    name: str, reader: Any, columns: Columns, place: Place, at_once: int
) -> Iterator[Record | RowError]:
    """Yield the rows from ``place`` on, ``at_once`` decoded together.

    The ``part`` of the place is a batch, ``inner`` the rows in it, and in those after it, before the place.
    """
    start, inner = place.row + place.inner + 1, place.inner
    there = reader.schema.names
    places = [position(name, there, setting, columns) for setting in columns]
    tops = [there[place] for place in places]
    classes = [arrow_class_names(reader.schema, column) for column in columns.values()]
    for batch in _batches(reader, place.part):
        if inner >= batch.num_rows:
            inner -= batch.num_rows
            continue
        for begin in range(inner, batch.num_rows, at_once):
            some = batch.slice(begin, at_once)
            arrays = [some.column(place) for place in places]
            yield from _records(name, start, arrays, tops, columns, classes) if columns else [()] * some.num_rows
            start += some.num_rows
        inner = 0


def arrow_class_names(schema: Any, column: str) -> list[str]:
    """Return the class names that ``ClassLabel`` of datasets keeps in an Arrow schema; none for other columns."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return list(map(str, names)) if isinstance(names, list) else []


def parquet_class_names(files: Iterable[Path], column: str) -> list[str]:
    """Return the class names in the schemas of Parquet files, which must be the same ones. Raises DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first: list[str] | None = None
    for file in files:
        try:
            names = arrow_class_names(pq.read_schema(file), column)
        except (OSError, pa.ArrowException):  # the reader reports a damaged file
            return []
        first = names if first is None else first
        if names != first:
            raise DataError(f"data file {file}: names other classes than the files before it: {names}, not {first}")
    return first or []


def _with_class_names(name: str, start: int, values: list[Any], names: list[str]) -> list[object]:
    """Replace class numbers by names; -1, the number of no label in datasets, becomes None."""
    if not names:
        return values
    for row, value in enumerate(values, start):
        if value is not None and not -1 <= value < len(names):
            raise row_error(name, row, f"label {value} is out of range: the dataset names {len(names)} classes")
    return [None if value is None or value < 0 else names[value] for value in values]
