"""Rows of Arrow files, of which some are decoded at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distcore_data.formats.arrow_columns import DECODED_ROWS, UNREADABLE, Chosen, records
from distcore_data.formats.arrow_numbers import NumberedBatches, forget_batches
from distcore_data.formats.columns import Columns, Record, RowError, until_cut
from distcore_data.formats.opening import FileState, broken, need_pyarrow, state_of
from distcore_data.formats.places import START, Place
from distcore_data.room import ON_REMOVAL

NEAR = 16
"""Rows that are decoded for each random access."""
FILES = 1024
"""Most files of which rows are read by number that stay mapped."""
FILE, END = b"ARROW1", b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The first bytes of a file with an index of its batches, and the last ones of a
stream, which has none.
"""


def read_arrow_file(
    path: Path, columns: Columns, place: Place = START, wanted: Container[int] | None = None
) -> Iterator[Record | RowError]:
    """Yield the rows of one Arrow file from ``place`` on.

    With ``wanted``, for a few rows, few are decoded at a time, and the file stays mapped
    for the next call.
    """
    name = f"data file {path}"
    need_pyarrow(name)
    if wanted is None or _is_cut(path):
        return _read_arrow(name, path, columns, place, "")
    return near_rows(name, path, columns, place)


def _is_cut(path: Path) -> bool:
    """Return True for a stream that ends before its end mark: it cannot be mapped as a whole."""
    return not _whole(path, state_of(path))


@lru_cache(maxsize=1024)
def _whole(path: Path, state: FileState) -> bool:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        return is_whole(mapped.read_buffer())


def _all(content: Any) -> Any:
    return content


def near_rows(
    name: str, path: Path, columns: Columns, place: Place, part: Callable[[Any], Any] = _all
) -> Iterator[Record | RowError]:
    """Yield the rows of a file that stays mapped. ``part`` returns what of its content is
    in the Arrow format.
    """
    import pyarrow as pa

    try:
        yield from _reader_records(name, _mapped(path, part, state_of(path)), columns, place, NEAR)
    except (pa.ArrowException, EOFError, *UNREADABLE) as error:
        raise broken(name, error, "cannot be read: ") from None


def take_arrow(
    path: Path,
    columns: Columns,
    parts: np.ndarray | None,
    rows: np.ndarray,
    part: Callable[[Any], Any] = _all,
) -> list[Record] | None:
    """Return some rows of a file that stays mapped; ``None`` if one cannot be read so.

    ``parts`` and ``rows``: the batch of each, and its number from there on, int64 ``(n,)``; without
    ``parts`` rows are counted from the first batch on.
    """
    import pyarrow as pa

    try:
        numbered = _numbered(path, tuple(columns.items()), part, state_of(path))
        return None if numbered is None else numbered.take(parts, rows)
    except (pa.ArrowException, EOFError, IndexError, *UNREADABLE):
        return None


@lru_cache(maxsize=FILES)
def _numbered(
    path: Path, asked: tuple[tuple[str, str], ...], part: Callable[[Any], Any], state: FileState
) -> NumberedBatches | None:
    """Return the batches of a file, or of a ``part`` of it, of which rows are counted from
    the first one on.
    """
    reader = _mapped(path, part, state)
    if reader is None:
        return None
    counts = [] if part is _all else [batch.num_rows for batch in _batches(reader)]
    chosen = Chosen.from_schema(f"data file {path}", reader.schema, dict(asked))
    return NumberedBatches(reader.get_batch, chosen, np.cumsum([0, *counts]))


@lru_cache(maxsize=FILES)
def _mapped(path: Path, part: Callable[[Any], Any], state: FileState) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        content = part(mapped.read_buffer())
    if content is None:
        return None
    reader = _opened(content)
    return reader if hasattr(reader, "get_batch") else _Listed(reader.schema, [*reader])


class _Listed(NamedTuple):
    """The batches of a stream, with the names of those of a file."""

    schema: Any
    batches: list[Any]

    @property
    def num_record_batches(self) -> int:
        return len(self.batches)

    def get_batch(self, number: int) -> Any:
        return self.batches[number]


def arrow_columns(path: Path) -> list[str]:
    """Return the names of the columns of a file."""
    need_pyarrow(f"data file {path}")
    return list(_mapped(path, _all, state_of(path)).schema.names)


def read_arrow_files(
    name: str, files: Iterable[Path], columns: Columns
) -> Iterator[Record | RowError]:
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


def _read_arrow(
    name: str, path: Path, columns: Columns, place: Place, where: str
) -> Iterator[Record | RowError]:
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
                raise EOFError(
                    "it ends without the end mark of Arrow, so a part is missing: write or fetch it"
                    " again"
                )
    except (pa.ArrowException, EOFError, *UNREADABLE) as error:
        after = f" after row {number - 1}" if number > 1 else ""
        raise broken(name, error, f"{where}cannot be read{after}: ") from None


def is_whole(content: Any) -> bool:
    """Return True for a file, whose index was at its end, and for a stream with its end mark."""
    return bool(
        content[: len(FILE)].to_pybytes() == FILE or content[-len(END) :].to_pybytes() == END
    )


def _forget() -> None:
    """Close all mapped files: while they are mapped, those that were removed take
    room on the disk.
    """
    _mapped.cache_clear()
    _numbered.cache_clear()
    forget_batches()


ON_REMOVAL.append(_forget)


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


def arrow_records(
    name: str, content: Any, columns: Columns, place: Place = START
) -> Iterator[Record | RowError]:
    """Yield the rows in a buffer of the Arrow file or stream format, from ``place`` on."""
    return _reader_records(name, _opened(content), columns, place, DECODED_ROWS)


def _reader_records(
    name: str, reader: Any, columns: Columns, place: Place, at_once: int
) -> Iterator[Record | RowError]:
    """Yield the rows from ``place`` on, ``at_once`` decoded together.

    The ``part`` of the place is a batch, ``inner`` the rows in it, and in those after
    it, before the place.
    """
    start, inner = place.row + place.inner + 1, place.inner
    chosen = Chosen.from_schema(name, reader.schema, columns)
    for batch in _batches(reader, place.part):
        if inner >= batch.num_rows:
            inner -= batch.num_rows
            continue
        for begin in range(inner, batch.num_rows, at_once):
            some = batch.slice(begin, at_once)
            yield from records(name, start, some, chosen)
            start += some.num_rows
        inner = 0
