"""Records from data files, one or several, and from splits of Arrow datasets.

Each problem with a source is a one-line error.

A record is the tuple of the values that a row has in the columns asked for. The task interprets the values.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from distcore import DataError, nearest
from distcore_data.filters import Filtered
from distcore_data.formats import COMPRESSED, READERS, Columns, Record, format_of, read_arrow, unreadable
from distcore_data.splits import Split

Source = Path | Split | Filtered
"""Where rows come from: data files, a split of a dataset of the library ``datasets``, or some of their rows."""
FILTER = "filter.column"
"""The config key that names the column of a filter."""


def read_records(source: Source, columns: Columns) -> Iterator[Record]:
    """Yield the values of ``columns`` in each row of the source, in order; several files one after the other.

    A row of a JSON file is an object with these columns, or a list with one value per column. A dot names a nested
    column: ``translation.en``. CSV values are strings; the delimiter is a comma, semicolon or tab, whichever finds the
    columns in the header. A row of a ``.txt`` file is a line; its only column is ``text``. A class of a split is its
    name if the dataset has names. Raises DataError for an unusable source, at the latest when the record is read. The
    message names the source and, if known, the row, counted from 1 without a header. Memory holds a whole ``.json``
    list, one row group of a Parquet file, one line of other files, or some rows of a split.
    """
    check_source(source)
    if isinstance(source, Filtered):
        return _kept(source, columns)
    if isinstance(source, Split):
        return read_arrow(source_name(source), source.files, columns)
    return chain.from_iterable(READERS[format_of(file)](file, columns) for file in files_of(source))


def _kept(source: Filtered, columns: Columns) -> Iterator[Record]:
    name, rows = source_name(source.source), 0
    for *record, value in read_records(source.source, {**columns, FILTER: source.column}):
        if source.keeps(value):
            rows += 1
            yield tuple(record)
    if not rows:
        raise DataError(f"{name}: {source.column} of no row matches {source.matches!r}; change filter.matches")


def files_of(source: Path) -> list[Path]:
    """Return the files of a path: the data files of a folder, or the files of a pattern or comma-separated list."""
    text = str(source)
    if source.is_dir():
        return sorted(path for path in source.iterdir() if path.is_file() and format_of(path) in READERS)
    if "," in text and not source.exists():
        return [file for part in text.split(",") for file in files_of(Path(part.strip()).expanduser())]
    is_pattern = glob.has_magic(text) and not source.exists()
    return sorted(map(Path, glob.glob(text, recursive=True))) if is_pattern else [source]


def data_format(source: Source) -> str:
    """Return the format of the rows: the extension of the files without that of their compression, or ``.arrow``."""
    if isinstance(source, Filtered):
        return data_format(source.source)
    return source.suffix if isinstance(source, Split) else next(map(format_of, files_of(source)), "")


def source_name(source: Source) -> str:
    """Return the name of the source in messages: ``data file reviews.csv``, ``dataset reviews@train``."""
    rows = source.source if isinstance(source, Filtered) else source
    return f"{'dataset' if isinstance(rows, Split) else 'data file'} {source}"


def check_source(source: Source) -> None:
    """Raise DataError unless ``source`` is a split, or readable files, not empty, in one known format."""
    if isinstance(source, Filtered):
        check_source(source.source)
        return
    if isinstance(source, Split):
        _check_pyarrow(source)
        return
    files = files_of(source)
    if not files and source.is_dir():
        expected = f"a file, files ({', '.join(READERS)}), or a folder that save_to_disk of datasets wrote"
        raise DataError(f"data file {source}: is a folder, expected {expected}")
    if not files:
        raise DataError(f"data files {source}: no file has such a name")
    for file in files:
        _check_file(file)
    if len(formats := sorted(set(map(format_of, files)))) > 1:
        raise DataError(f"data files {source}: are of several kinds ({', '.join(formats)}); give those of one kind")


def _check_file(file: Path) -> None:
    if not file.exists():
        beside = (path.name for path in file.parent.iterdir()) if file.parent.is_dir() else ()
        raise DataError(f"data file {file}: no such file{nearest(file.name, beside)}")
    if format_of(file) not in READERS:
        known = f"{', '.join(READERS)}, also with {' or '.join(COMPRESSED)}"
        raise DataError(f"data file {file}: unknown extension {file.suffix!r} (known: {known})")
    if not file.is_file():
        raise DataError(f"data file {file}: not a regular file")
    if file.stat().st_size == 0:
        raise DataError(f"data file {file}: is empty")
    if format_of(file) == ".parquet" or file.suffix == ".zst":
        _check_pyarrow(file)


def _check_pyarrow(source: Source) -> None:
    if find_spec("pyarrow") is None:
        needs = "needs pyarrow, which is not installed: pip install pyarrow"
        raise DataError(f"{source_name(source)}: {needs}")


def source_digest(source: Source) -> str:
    """Return the SHA-256 of the source's content in hexadecimal, followed by the extension, which decides the format.

    Raises DataError if it cannot be read.
    """
    if isinstance(source, Filtered):
        content = repr((source_digest(source.source), source.column, source.matches))
        return hashlib.sha256(content.encode()).hexdigest() + data_format(source)
    check_source(source)
    files = source.files if isinstance(source, Split) else files_of(source)
    digests = list(map(_sha256, files))
    several = isinstance(source, Split) or len(files) > 1
    return (hashlib.sha256("".join(digests).encode()).hexdigest() if several else digests[0]) + data_format(source)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from None
