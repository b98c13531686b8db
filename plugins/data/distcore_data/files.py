"""Records from data files, one or several, and from splits of Arrow datasets.

Each problem with a source is a one-line error.

A record is the tuple of the values that a row has in the columns asked for. The
task interprets the values.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path

from distcore import DataError, nearest
from distcore.files import is_git_lfs_pointer
from distcore_data.bad_rows import good_rows
from distcore_data.fetching import is_copy, of_remote, present, shown
from distcore_data.filters import Filtered
from distcore_data.formats.arrow_rows import read_arrow_files
from distcore_data.formats.columns import Columns, Record, RowError, row_error
from distcore_data.formats.installed import (
    extensions,
    file_format,
    folder_format,
    format_of,
    is_known,
    names_of_shards,
    refuse_unread_shards,
    shard_format,
)
from distcore_data.formats.opening import COMPRESSED, need_pyarrow, unreadable
from distcore_data.formats.parquet_rows import partition_columns
from distcore_data.formats.reading import parts_of, read_rows
from distcore_data.indexes.entries import known_index
from distcore_data.indexes.workers import index_files
from distcore_data.paths import LIST, files_of
from distcore_data.remote import url_of
from distcore_data.room import INDEX
from distcore_data.splits import Split

Source = Path | Split | Filtered
"""Where rows come from: data files, a split of a dataset of the library ``datasets``, or
some of their rows.
"""
RENAMED = {
    ".tab": "; rename it to .tsv",
    ".xlsx": "; save it as .csv",
}
"""What to do with tables of other names."""
FILTER = "filter.column"
"""The config key that names the column of a filter."""


def read_records(source: Source, columns: Columns) -> Iterator[Record]:
    """Yield the values of ``columns`` in each row of the source, in order; several files
    one after the other.

    A row of a JSON file is an object with these columns, or a list with one value per column. A
    dot names a nested
    column: ``translation.en``. CSV values are strings; the delimiter is a comma, semicolon or
    tab, whichever finds the columns in the header. A row of a ``.txt`` file is a line; its only
    column is ``text``. A row of a tar file is the members of one key. A class of a Parquet file, an
    Arrow file or a split is its name if the features of datasets have names, inside lists and
    structs, too. Raises DataError for an unusable source, at the latest when the record is read.
    The message names the source and, if known, the row, counted from 1 without a header; bad rows
    are passed over inside ``skipping``. Memory holds a whole ``.json`` list, one row group of a
    Parquet file, some rows of an Arrow file or a split, or one row of others.
    """
    return (record for _, record in numbered_records(source, columns))


def numbered_records(
    source: Source, columns: Columns, problem: Callable[[Record], str | None] = lambda record: None
) -> Iterator[tuple[int, Record]]:
    """Yield the records, each with the number of its row, from 0, as ``IndexedRows`` counts.

    ``problem`` returns what is wrong with a record, which makes it a bad row.
    Raises as ``read_records`` does.
    """
    check_source(source)
    if isinstance(source, Filtered):
        return _kept(source, columns, problem)
    if isinstance(source, Split):
        name = source_name(source)
        return good_rows(_counted(read_arrow_files(name, source.files, columns), name, 0, problem))
    return good_rows(_rows(files_of(source), columns, problem))


def _rows(
    paths: Iterable[Path], columns: Columns, problem: Callable[[Record], str | None]
) -> Iterator[tuple[int, Record] | RowError]:
    parts = [(path, *part) for path in paths for part in parts_of(path)]
    files, start = present(file for _, file, _ in parts), 0
    for (path, file, place), _ in zip(parts, files, strict=True):
        try:
            rows = (
                of_remote(row, file) if isinstance(row, RowError) else row
                for row in read_rows(path, columns, place)
            )
            end = yield from _counted(rows, f"data file {shown(file)}", start, problem)
        except DataError as error:
            raise of_remote(error, file) from None
        shards = shard_format(path) if file != path else None
        start = start + shards.rows(path)[place.part] if shards else end


def _counted(
    rows: Iterable[Record | RowError],
    name: str,
    start: int,
    problem: Callable[[Record], str | None],
) -> Generator[tuple[int, Record] | RowError, None, int]:
    """Yield the rows of the file ``name`` with their numbers, or their errors. Return the
    number after the last.
    """
    number = start
    for row in rows:
        what = None if isinstance(row, RowError) else problem(row)
        error = row_error(name, number - start + 1, what) if what else row
        yield error if isinstance(error, RowError) else (number, error)
        number += error.rows if isinstance(error, RowError) else 1
    return number


def _kept(
    source: Filtered, columns: Columns, problem: Callable[[Record], str | None]
) -> Iterator[tuple[int, Record]]:
    def problem_of_kept(record: Record) -> str | None:
        return problem(record[:-1]) if source.keeps(record[-1]) else None

    name, rows = source_name(source.source), 0
    for number, record in numbered_records(
        source.source, {**columns, FILTER: source.column}, problem_of_kept
    ):
        if source.keeps(record[-1]):
            rows += 1
            yield number, record[:-1]
    if not rows:
        raise source.keeps_none(name)


def data_format(source: Source) -> str:
    """Return the format of the rows.

    It is the extension of the files without that of their compression, ``.arrow`` for a split, or
    the name of a format
    of folders: ``MDS``, ``litdata``.
    """
    if isinstance(source, Filtered):
        return data_format(source.source)
    return (
        source.suffix if isinstance(source, Split) else next(map(format_of, files_of(source)), "")
    )


def source_name(source: Source) -> str:
    """Return the name of the source in messages: ``data file
    reviews.csv``, ``dataset reviews@train``.
    """
    rows = source.source if isinstance(source, Filtered) else source
    return f"{'dataset' if isinstance(rows, Split) else 'data file'} {url_of(source) or source}"


def check_source(source: Source) -> None:
    """Raise DataError unless ``source`` is a split, or readable files, not empty,
    in one known format.
    """
    if isinstance(source, Filtered):
        check_source(source.source)
        return
    if isinstance(source, Split):
        need_pyarrow(source_name(source))
        return
    files = files_of(source)
    if not files and source.is_dir():
        if columns := _partitions(source):
            pattern = f"{source}/**/*.parquet"
            names = (
                f"{', '.join(columns)}, which {'is' if len(columns) == 1 else 'are'} in the names"
                " of folders"
            )
            raise DataError(
                f"data folder {source}: is partitioned by {names}; for the columns in its files"
                f" give '{pattern}', for others write these into the files:"
                f" pyarrow.dataset.dataset('{source}', partitioning='hive')"
            )
        expected = (
            f"a file, files ({', '.join(extensions())}), or a folder of"
            f" {', '.join([*names_of_shards(), 'datasets'])} or of folders of .txt"
        )
        raise DataError(f"data file {source}: is a folder, expected {expected}")
    if not files:
        raise DataError(f"data files {source}: no file has such a name")
    for file in files:
        _check_file(file)
    if len(formats := sorted(set(map(format_of, files)))) > 1:
        raise DataError(
            f"data files {source}: are of several kinds ({', '.join(formats)}); give those of one"
            " kind"
        )
    if twice := [
        file for file, times in Counter(file.resolve() for file in files).items() if times > 1
    ]:
        raise DataError(f"data files {source}: {twice[0]} is named twice; name it once")


def _partitions(folder: Path) -> list[str]:
    """Return the columns by which Hive and Spark have partitioned a
    folder: ``label=0/part-0.parquet``.
    """
    file = next(
        (
            file
            for file in sorted(folder.rglob("*.parquet"))
            if "=" in str(file.relative_to(folder))
        ),
        None,
    )
    return partition_columns(str(file.relative_to(folder))) if file else []


def _check_file(file: Path) -> None:
    if not file.exists() and not is_copy(file):
        beside = (path.name for path in file.parent.iterdir()) if file.parent.is_dir() else ()
        raise DataError(f"data file {file}: no such file{nearest(file.name, beside)}")
    if file.exists() and not file.is_file() and not file.is_dir():
        problem = (
            "is a pipe or a device, which is read once, so a resume could not go on inside it"
            " (law 7)"
        )
        raise DataError(f"data file {file}: {problem}; write its rows to a file")
    if folder := folder_format(file):
        if lost := next(
            (part for part in folder.files(file) if not (part.is_file() or is_copy(part))), None
        ):
            raise DataError(f"data file {lost}: no such file, but {INDEX} names it; fetch it")
        return
    may_be_a_part = file.name == INDEX or not is_known(format_of(file))
    if may_be_a_part and (shards := shard_format(file.parent)):
        raise DataError(
            f"data file {file}: is a part of a folder of {shards.name}; name the folder,"
            f" {file.parent}"
        )
    if may_be_a_part:
        refuse_unread_shards(file.parent)
    if not is_known(format_of(file)):
        *some, last = COMPRESSED
        known = f"{', '.join(extensions())}, {LIST}, also with {', '.join(some)} or {last}"
        hint = RENAMED.get(file.suffix, "")
        raise DataError(
            f"data file {file}: unknown extension {file.suffix!r} (known: {known}){hint}"
        )
    if file.is_file() and file.stat().st_size == 0:
        raise DataError(f"data file {file}: is empty")
    if is_git_lfs_pointer(file):
        raise DataError(
            f"data file {file}: is a pointer of Git LFS, not the file; fetch it: git lfs pull"
        )
    if file.suffix.lower() == ".zst":
        need_pyarrow(f"data file {file}")


def source_digest(source: Source) -> str:
    """Return the SHA-256 of the source's content in hexadecimal, followed by the extension,
    which decides the format.

    Raises DataError if it cannot be read.
    """
    if isinstance(source, Filtered):
        content = repr((source_digest(source.source), source.column, source.matches))
        return hashlib.sha256(content.encode()).hexdigest() + data_format(source)
    check_source(source)
    parts, files = source_parts(source), indexed_files(source)
    known: dict[Path, str] = {}
    try:
        known = {
            file: index.digest for file, index in zip(files, index_files(files)[0], strict=True)
        }
    except DataError as error:
        # Either its rows cannot be read, and the reader says where, or it cannot be fetched.
        if any(is_copy(file) and not file.is_file() for file in files):
            raise reduce(of_remote, files, error) from None
    digests = [_of_folder(part, known) if part.is_dir() else _sha256(part, known) for part in parts]
    several = isinstance(source, Split) or len(parts) > 1
    return (
        hashlib.sha256("".join(digests).encode()).hexdigest() if several else digests[0]
    ) + data_format(source)


def source_parts(source: Path | Split) -> list[Path]:
    """Return the files of a source, and the folders that are a source by themselves."""
    return list(source.files) if isinstance(source, Split) else files_of(source)


def indexed_files(source: Path | Split) -> list[Path]:
    """Return the files of a source that have an index: all but those of folders of
    ``.txt``, of a row each.
    """
    return [
        file
        for part in source_parts(source)
        for file in (_shards(part) if part.is_dir() else [part])
    ]


def _shards(path: Path) -> list[Path]:
    """Return the files in a folder of shards."""
    folder = shard_format(path)
    return [path / INDEX, *folder.files(path)] if folder else []


def _of_folder(path: Path, known: Mapping[Path, str]) -> str:
    """Return a digest of the files in a folder of rows, with their names."""
    folder = folder_format(path)
    files = _shards(path) or (folder.files(path) if folder else [])
    content = repr([(str(file.relative_to(path)), _sha256(file, known)) for file in files])
    return hashlib.sha256(content.encode()).hexdigest()


def _sha256(path: Path, known: Mapping[Path, str]) -> str:
    """Return the digest of a file; ``known``: digests of files that were read just now."""
    if path in known:
        return known[path]
    if index := known_index(path):
        return index.digest
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from None


def source_columns(source: Source) -> list[str]:
    """Return the names of the columns of a source, of a JSON file those of
    its first rows.

    Only of JSON, CSV, Parquet and Arrow files and of splits; others give none. Raises DataError
    for a missing source.
    """
    if isinstance(source, Filtered):
        return source_columns(source.source)
    kind = data_format(source)
    files = source.files if isinstance(source, Split) else present(files_of(source))
    file = next(iter(files), None)
    form = file_format(kind)
    if file is None or form is None or form.column_names is None:
        return []
    try:
        return form.column_names(file)
    except (DataError, ValueError, OSError):  # whose reader says it better
        return []
