"""The laws of a reader of rows, as ``distcore predict`` uses it:
``distcore check --reader NAME``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from pathlib import Path

import psutil

from distcore import DataError
from distcore.testing import Measured, Suite, none_of
from distcore_workbench.kits.reader_lab import (
    COLUMNS,
    ROWS,
    ReaderLab,
    Row,
    load_reader,
    reader_lab,
)

MANY = 20_000

SUITE = Suite("reader", reader_lab)


@SUITE.law("order")
def all_rows(lab: ReaderLab) -> Measured:
    """Every row comes once, in the order of the source, with its values and their types."""
    wrong = [
        f"{row!r} for {expected!r}"
        for row, expected in _unequal(lab.read(lab.source()), _tuples(ROWS))
    ]
    return none_of(wrong, "rows", "yield a tuple of the values for each row")


@SUITE.law("order")
def columns_as_asked(lab: ReaderLab) -> Measured:
    """A row has the columns that were asked for and no other, in their order."""
    names = ("share", "text")
    rows = lab.read(lab.source(), {f"columns.{name}": name for name in names})
    wrong = [f"{row!r} for {expected!r}" for row, expected in _unequal(rows, _tuples(ROWS, names))]
    return none_of(wrong, "rows", "yield the values in the order of columns.values()")


@SUITE.law("order")
def two_at_once(lab: ReaderLab) -> Measured:
    """Two readings of a source at the same time do not disturb each other."""
    source = lab.source()
    first_reading = lab.reader.read(source, COLUMNS)
    second_reading = lab.reader.read(source, COLUMNS)
    wrong = []
    # Row by row in turn. Not strict: the number of rows is another law.
    for first, second in zip(first_reading, second_reading, strict=False):
        if tuple(first) != tuple(second):
            wrong.append(f"{first!r} and {second!r}")
    return none_of(wrong, "rows that differ", "keep the place in the generator, not on the reader")


@SUITE.law("order")
def no_rows(lab: ReaderLab) -> Measured:
    """A source without rows has none, or is refused in one line."""
    source = lab.source([])
    try:
        rows = lab.read(source)
    except DataError as error:
        return none_of(_faults(error, source), "error", "name the source in one line")
    return none_of(map(repr, rows), "rows of an empty source", "yield nothing")


@SUITE.law("evaluation")
def damage_is_seen(lab: ReaderLab) -> Measured:
    """A source that was cut gives the rows before the cut, or a DataError: no other
    row, no other error.
    """
    source = lab.source()
    for file in (
        [source]
        if source.is_file()
        else sorted(path for path in source.rglob("*") if path.is_file())
    ):
        os.truncate(file, file.stat().st_size * 3 // 5)
    rows, wrong = [], []
    try:
        for row in lab.reader.read(source, COLUMNS):
            rows.append(tuple(row))
    except DataError as error:
        wrong += _faults(error, source)
    except Exception as error:  # of the reader
        wrong.append(f"{type(error).__name__}: {error}")
    wrong += [
        f"{row!r} for {expected!r}"
        for row, expected in zip(rows, _tuples(ROWS), strict=False)
        if row != expected
    ]
    return none_of(wrong, "in a source that was cut", "raise DataError with source and row")


@SUITE.law("agreement")
def missing_column(lab: ReaderLab) -> Measured:
    """A column that is not there is a DataError: one line with its name and the source."""
    source = lab.source()
    return _refusal(lambda: lab.read(source, {"columns.text": "nowhere"}), source, "nowhere")


@SUITE.law("agreement")
def missing_source(lab: ReaderLab) -> Measured:
    """A source that is not there is a DataError: one line with its path, also from ``digest``."""
    gone = lab.folder / f"gone{lab.source().suffix}"
    by_read = _refusal(lambda: lab.read(gone), gone)
    by_digest = _refusal(lambda: lab.reader.digest(gone), gone)
    return by_read if by_read.error else by_digest


@SUITE.law("resume")
def digest_of_content(lab: ReaderLab) -> Measured:
    """The digest is that of the rows.

    It is equal for equal ones elsewhere, another for a changed value or another order.
    """
    changed_rows = [dict(row) for row in ROWS]
    changed_rows[2]["count"] += 1

    def digest_of(rows: Sequence[Row]) -> object:
        return lab.reader.digest(lab.source(rows))

    digest = digest_of(ROWS)
    wrong = []
    if not isinstance(digest, str) or not digest:
        wrong.append(f"{digest!r}, not a text")
    if digest_of(ROWS) != digest:
        wrong.append("another for the same rows in another place")
    if digest_of(changed_rows) == digest:
        wrong.append("the same for a changed value")
    if digest_of(ROWS[::-1]) == digest:
        wrong.append("the same for another order")
    return none_of(wrong, "digest", "hash the content of the source, by hashlib")


@SUITE.law("resume")
def digest_of_any_process(lab: ReaderLab) -> Measured:
    """Another process computes the same digest."""
    source = lab.source()
    code = (
        "import sys; from distcore_workbench.kits.reader import digest;"
        " print(digest(*sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, lab.name, str(source)]
    run = subprocess.run(
        command,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    here = str(lab.reader.digest(source))
    elsewhere = run.stdout.strip() or run.stderr.strip()[-200:]
    wrong = [] if here == elsewhere else [f"{elsewhere} for {here}"]
    return none_of(wrong, "digest elsewhere", "do not use hash()")


@SUITE.law("surprise")
def changes_nothing(lab: ReaderLab) -> Measured:
    """Reading leaves the source and its folder as they are."""
    source = lab.source()
    before = _files(source.parent)
    lab.read(source)
    lab.reader.digest(source)
    after = _files(source.parent)
    paths = before.keys() | after.keys()
    wrong = sorted(str(path) for path in paths if before.get(path) != after.get(path))
    return none_of(wrong, "changed beside the source", "write to a cache of your own")


@SUITE.law("surprise")
def closes_files(lab: ReaderLab) -> Measured:
    """Whoever stops in the middle leaves no file open."""
    source = lab.source()
    rows = lab.reader.read(source, COLUMNS)
    list(islice(rows, 2))
    del rows
    still_open = [
        file.path
        for file in psutil.Process().open_files()
        if Path(file.path).is_relative_to(source.parent)
    ]
    return none_of(still_open, "still open", "read inside a with block")


@SUITE.law("surprise")
def row_by_row(lab: ReaderLab) -> Measured:
    """The first row does not need all others in memory: data may be larger than it."""
    rows = [{**ROWS[0], "count": number} for number in range(MANY)]
    source = lab.source(rows)
    # Imports and caches of the first use would count as memory of the first row.
    lab.read(lab.source())
    memory_of_first = _peak(lab, source, 1)
    memory_of_all = _peak(lab, source, MANY)
    note = f"memory of the first row, as a part of that of all {MANY}; yield rows as they are read"
    return Measured(error=memory_of_first / memory_of_all, bound=0.5, note=note)


def digest(name: str, source: str) -> str | None:
    """Return a reader's digest of a source."""
    value: str | None = load_reader(name).digest(Path(source))
    return value


def _tuples(rows: Sequence[Row], names: Sequence[str] = tuple(ROWS[0])) -> list[tuple[object, ...]]:
    """Return the values of rows in the order of ``names``, as a reader yields them."""
    return [tuple(row[name] for name in names) for row in rows]


def _unequal(
    rows: list[tuple[object, ...]], expected: list[tuple[object, ...]]
) -> list[tuple[object, object]]:
    """Return pairs that differ in a value or its type; a missing row is ``None``."""
    unequal: list[tuple[object, object]] = []
    for row, expected_row in zip_longest(rows, expected):
        # By repr, too: 1, 1.0 and True are equal.
        if row != expected_row or repr(row) != repr(expected_row):
            unequal.append((row, expected_row))
    return unequal


def _refusal(action: Callable[[], object], source: Path, *words: str) -> Measured:
    """Return what is wrong with the DataError of ``action``, which must have these ``words``."""
    try:
        action()
    except DataError as error:
        faults = _faults(error, source, *words)
        return none_of(faults, "error", "name the source, and what is wrong, in one line")
    except Exception as error:  # of the reader
        return none_of([f"{type(error).__name__}: {error}"], "error", "raise DataError")
    return none_of(["nothing was raised"], "error", "raise DataError")


def _faults(error: DataError, source: Path, *words: str) -> list[str]:
    text = str(error)
    return (
        [f"{text!r}"]
        if "\n" in text or any(word not in text for word in (source.name, *words))
        else []
    )


def _files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def _peak(lab: ReaderLab, source: Path, rows: int) -> int:
    """Return the most bytes that Python has at a time while it reads the first rows."""
    tracemalloc.start()
    try:
        list(islice(lab.reader.read(source, COLUMNS), rows))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
