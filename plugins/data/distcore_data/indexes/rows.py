"""Rows of files by number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from distcore import DataError
from distcore_data.cache import byte_setting
from distcore_data.fetching import REMOTE, TRIES, of_remote, present, shown
from distcore_data.files import check_source, indexed_files, source_name, source_parts
from distcore_data.formats.arrow_rows import NEAR
from distcore_data.formats.blocks import TakeFromBlock, longest_block, take_between
from distcore_data.formats.columns import Columns, CutError, Record, RowError, row_error, until_cut
from distcore_data.formats.installed import file_format, folder_format, format_at, format_of
from distcore_data.formats.places import START, Place
from distcore_data.formats.reading import parts_of, read_rows, take_rows
from distcore_data.formats.tar_rows import read_tar
from distcore_data.indexes.copies import CopiedRecords, copied_rows
from distcore_data.indexes.workers import index_files
from distcore_data.orders.ahead import fetch_ahead
from distcore_data.room import BYTES, LIMIT
from distcore_data.splits import Split

T = TypeVar("T")


class IndexedRows:
    """The rows of files or of a split by number, from 0, as ``read_records`` counts them;
    none is in memory.

    A row of JSON lines, CSV and ``.txt`` files is cut out of what is between two places of the
    index; one of tar and Parquet files is read with those near to it. Files that cannot be sought,
    such as compressed ones, are copied to the cache when a row of them is asked for.
    """

    def __init__(self, source: Path | Split, columns: Columns, *, whole: bool = True) -> None:
        """Open the index, and make what is missing. ``columns`` as for
        ``read_records``. Raises DataError.

        If not ``whole``, the rows of a file that is cut are those before its end.
        """
        check_source(source)
        self._source, self._columns, self._whole = source, columns, whole
        self._parts = source_parts(source)
        self._kinds = list(map(format_of, self._parts))
        self._formats = list(map(format_at, self._parts))
        files = [part for part in self._parts if not part.is_dir()]
        known = dict(zip(files, index_files(files)[0], strict=True))
        if cut := next((part for part in files if whole and known[part].cut), None):
            raise of_remote(DataError(known[cut].cut), cut)
        self._places = [
            known[part].places if part in known else _of_folder(part) for part in self._parts
        ]
        self._indexes = [known.get(part) for part in self._parts]
        counts = [known[part].rows if part in known else sum(_counts(part)) for part in self._parts]
        self._ends = np.cumsum([0, *counts])
        self._shards = {
            part: [file for file, _ in parts_of(part)] for part in self._parts if part.is_dir()
        }
        self._copies = [
            copied_rows(part, known[part], columns) if part in known else None
            for part in self._parts
        ]
        self._takes, self._longest = dict[int, TakeFromBlock | None](), longest_block()

    def __reduce__(self) -> tuple[Any, tuple[Path | Split, Columns]]:
        """Let another process open the index itself: it maps the same file, and knows the
        copies of remote files.
        """
        return partial(IndexedRows, whole=self._whole), (self._source, self._columns)

    def files(self) -> list[tuple[str, str, int]]:
        """Return name, SHA-256 and number of rows of each file, in order; of shards that a
        listing counts no rows.
        """
        files = indexed_files(self._source)
        return [
            (shown(file), one.digest, one.rows)
            for file, one in zip(files, index_files(files)[0], strict=True)
        ]

    def __len__(self) -> int:
        """Return the number of rows, with those that cannot be read."""
        return int(self._ends[-1])

    def __getitem__(self, rows: Sequence[int] | np.ndarray) -> list[Record]:
        """Return these rows, in this order. Raises IndexError, or DataError for a row
        that cannot be read.
        """
        # Of some dozens of rows, Python's own lists take less time than arrays.
        numbers: list[int] = np.asarray(rows, np.int64).tolist()
        ascending = sorted(set(numbers))
        if ascending and not 0 <= ascending[0] <= ascending[-1] < len(self):
            raise IndexError(f"{source_name(self._source)}: has the rows 0 to {len(self) - 1}")
        wanted = np.array(ascending, np.int64)
        owners = np.searchsorted(self._ends, wanted, "right") - 1
        parts = [
            part
            for owner, here in _split(owners, wanted)
            for part in self._by_file(owner, here - self._ends[owner])
        ]
        read = list[Record]()
        read_where_they_are = (file for file, owner, *_ in parts if not self._copies[owner])
        with closing(present(read_where_they_are)) as files:
            for file, owner, shard, inside in parts:
                if self._copies[owner]:
                    read += self._read_copied(owner, inside)
                else:
                    next(files)
                    read += self._read_there(owner, file, shard, inside)
        by_number = dict(zip(ascending, read, strict=True))
        return [by_number[number] for number in numbers]

    def pieces(self, most: int) -> np.ndarray:
        """Return the first row of each piece of a file or shard, and the end of the
        last one, int64, ascending.

        A piece has at most so many rows. A file that comes into the cache as a whole is one: a
        remote file, and one that is copied, if the cache does not hold the copies of all.
        """
        have_room = self.have_room
        starts = [np.zeros(1, np.int64)]
        for owner, part in enumerate(self._parts):
            files = self._shards.get(part, [part])
            inside = self._places[owner][:, 0] if len(files) > 1 else np.zeros(1, np.int64)
            bounds = [*(inside + self._ends[owner]).tolist(), int(self._ends[owner + 1])]
            for file, (first, end) in zip(files, pairwise(bounds), strict=True):
                is_whole = file in REMOTE or (self._copies[owner] and not have_room)
                count = 1 if is_whole else -(-(end - first) // most)
                starts.append(np.linspace(first, end, count + 1)[1:].astype(np.int64))
        return np.unique(np.concatenate(starts))

    @property
    def remote_bytes(self) -> int:
        """Bytes of the files that have to be fetched."""
        files = (file for part in self._parts for file in self._shards.get(part, [part]))
        return sum(REMOTE[file].size for file in files if file in REMOTE)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cache that all rows take, as far as that is known before they are read: of
        remote files, and of copies.
        """
        total = 0
        for part, copy in zip(self._parts, self._copies, strict=True):
            files = self._shards.get(part, [part])
            fetched = sum(REMOTE[file].size for file in files if file in REMOTE)
            total += copy.expected_bytes() if copy else fetched
        return total

    @property
    def have_room(self) -> bool:
        """True if the cache holds all files that come into it."""
        return self.cached_bytes <= byte_setting(LIMIT, BYTES)

    def check_room(
        self, use: str = "each step reads rows of", remedy: str = "set order.kind=windows"
    ) -> None:
        """Raise DataError if the files that come into the cache are more than it holds, all of
        which have a ``use``.
        """
        if not self.have_room:
            limit = byte_setting(LIMIT, BYTES)
            what = f"{use} all files, {self.cached_bytes} bytes, and the cache holds {limit}"
            raise DataError(f"{source_name(self._source)}: {what}; {remedy}, or raise {LIMIT}")

    def fetch(self, numbers: np.ndarray) -> None:
        """Let a thread fetch the files of rows that will be asked for, in
        this order, int64 ``(n,)``.
        """
        owners = self._ends.searchsorted(numbers, "right") - 1
        files = dict[Path, None]()
        for owner, number in zip(owners.tolist(), numbers.tolist(), strict=True):
            copy = self._copies[owner]
            if copy and copy.is_there():
                continue
            [(file, *_)] = self._by_file(owner, np.array([number - self._ends[owner]]))
            files[file] = None
        fetch_ahead(list(files))

    def problem(self, number: int, what: str) -> RowError:
        """Return the error of a row, which names its file, and its number there."""
        if isinstance(self._source, Split):
            return row_error(source_name(self._source), number + 1, what)
        owner = int(np.searchsorted(self._ends, number, "right")) - 1
        row = number - int(self._ends[owner])
        [(file, *_)] = self._by_file(owner, np.array([row]))
        if file != self._parts[owner]:
            starts = self._places[owner][:, 0]
            row -= int(starts[np.searchsorted(starts, row, "right") - 1])
        return row_error(f"data file {shown(file)}", row + 1, what)

    def _by_file(
        self, owner: int, numbers: np.ndarray
    ) -> Iterator[tuple[Path, int, int, np.ndarray]]:
        """Yield rows of one file or folder, ascending, by the file that they are in, which
        has a number there.
        """
        files = self._shards.get(self._parts[owner], [self._parts[owner]])
        if len(files) == 1:
            yield files[0], owner, 0, numbers
            return
        shards = self._places[owner][:, 0].searchsorted(numbers, "right") - 1
        for shard, here in _split(shards, numbers):
            yield files[shard], owner, shard, here

    def _read_there(self, owner: int, file: Path, shard: int, numbers: np.ndarray) -> list[Record]:
        """Return the result of ``_read``. A copy that another process removes
        meanwhile is fetched again.
        """
        for _ in range(TRIES):
            try:
                return self._read(owner, file, shard, numbers)
            except (DataError, FileNotFoundError) as error:
                if file not in REMOTE or file.is_file():
                    raise (
                        of_remote(error, file) if isinstance(error, DataError) else error
                    ) from None
                deque(present([file]), maxlen=0)
        raise _removed(file)

    def _read_copied(self, owner: int, numbers: np.ndarray) -> list[Record]:
        """Return rows of one file, ascending, from its copy, which is made if it is not there."""
        file, copy = self._parts[owner], self._copies[owner]
        assert copy
        rows: list[Record | None] = [None] * len(numbers)
        for _ in range(TRIES):
            try:
                rows = copy.take(numbers) if copy.is_possible else rows
            except FileNotFoundError:
                _while_present(file, copy.make)
                continue
            if None in rows:
                return _while_present(file, partial(self._read_left, owner, rows, numbers))
            return cast("list[Record]", rows)
        raise _removed(file)

    def _read(self, owner: int, file: Path, shard: int, numbers: np.ndarray) -> list[Record]:
        """Return rows of one file, or of one file of a folder, the
        shard of this number, ascending.
        """
        part, places = self._parts[owner], self._places[owner]
        if take := self._take_from_block(owner):
            count = int(self._ends[owner + 1] - self._ends[owner])
            rows = take_between(part, places, count, numbers, take, self._longest)
        elif self._copies[owner]:
            return self._read_copied(owner, numbers)
        else:
            form = self._formats[owner]
            taken = take_rows(form, part, file, self._columns, places, numbers, shard)
            rows = [None] * len(numbers) if taken is None else [*taken]
        if None in rows:
            return self._read_left(owner, rows, numbers)
        return cast("list[Record]", rows)

    def _read_left(
        self, owner: int, rows: list[Record | None], numbers: np.ndarray
    ) -> list[Record]:
        """Return ``rows``, of which those that are ``None`` are read from the place before each."""
        left = [at for at, row in enumerate(rows) if row is None]
        for at, row in zip(left, self._each(owner, numbers[left]), strict=True):
            rows[at] = row
        return cast("list[Record]", rows)

    def _take_from_block(self, owner: int) -> TakeFromBlock | None:
        """Return what takes rows of a file, which is there, out of what is between two places;
        ``None`` where nothing does. Raises DataError.
        """
        if owner not in self._takes:
            index, part = self._indexes[owner], self._parts[owner]
            is_sought = index is not None and not self._copies[owner]
            form = file_format(index.kind) if index and is_sought else None
            opens = form.open_blocks if form else None
            self._takes[owner] = opens(part, self._columns) if opens else None
            if index and opens and not self._takes[owner]:
                self._copies[owner] = CopiedRecords(part, index, self._columns)
        return self._takes[owner]

    def _each(self, owner: int, numbers: np.ndarray) -> Iterator[Record]:
        """Yield rows of one file or folder; each is read from the place before it."""
        part, kind, places = self._parts[owner], self._kinds[owner], self._places[owner]
        if self._copies[owner] and kind == ".csv":
            places = np.array([START])  # the index took another delimiter
        begins = np.searchsorted(places[:, 0], numbers, "right") - 1
        anywhere = part in self._shards or kind == ".arrow"
        opened: Any = None
        with ExitStack() as stack:
            for begin, ascending in _runs(begins.tolist(), numbers.tolist(), near=anywhere):
                place = Place(*places[begin].tolist())
                first = ascending[0] if anywhere else place.row
                place = place._replace(inner=place.inner + first - place.row)
                wanted = frozenset(ascending)
                if kind == ".tar" and part.suffix.lower() == kind:
                    opened = opened or stack.enter_context(part.open("rb"))
                    rows = until_cut(read_tar(part, self._columns, place, wanted, opened))
                else:
                    rows = read_rows(part, self._columns, place, wanted, self._formats[owner])
                yield from self._from(rows, first, ascending)

    def _from(
        self, rows: Iterator[Record | RowError], first: int, ascending: list[int]
    ) -> Iterator[Record]:
        """Yield the rows ``ascending`` of ``rows``, which begin with row ``first``."""
        end = first
        row: Record | RowError | None = None
        for number in ascending:
            while end <= number and not isinstance(row, CutError):
                row = next(rows, None)
                end += row.rows if isinstance(row, RowError) else 1
            if row is None:
                raise DataError(f"{source_name(self._source)}: changed while it was read")
            if isinstance(row, RowError):
                raise row
            yield row


def _while_present(file: Path, action: Callable[[], T]) -> T:
    """Return the result of ``action`` on a file, which is fetched first if it is remote."""
    try:
        with closing(present([file])) as files:
            next(files)
            return action()
    except DataError as error:
        raise of_remote(error, file) from None


def _removed(file: Path) -> DataError:
    return DataError(
        f"data file {shown(file)}: other processes remove it before it is read; raise {LIMIT}"
    )


def _split(keys: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each of the keys, which ascend, with its numbers."""
    ends = [*(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
    for first, end in pairwise([0, *ends] if len(keys) else []):
        yield int(keys[first]), numbers[first:end]


def _runs(
    begins: Sequence[int], numbers: Sequence[int], *, near: bool
) -> Iterator[tuple[int, list[int]]]:
    """Yield the place and the numbers of rows that are read in one go; if ``near``, each is
    near the one before.
    """
    run = list[int]()
    for at, number in enumerate(numbers):
        if run and (begins[at] != begins[at - 1] or (near and number > run[-1] + NEAR)):
            yield begins[at - 1], run
            run = []
        run.append(number)
    if run:
        yield begins[-1], run


def _counts(folder: Path) -> Sequence[int]:
    form = folder_format(folder)
    return form.rows(folder) if form else []


def _of_folder(folder: Path) -> np.ndarray:
    """Return the places of a folder, whose format says the rows of each shard."""
    counts = _counts(folder)
    places = np.zeros((len(counts), len(START)), np.int64)
    places[:, 0], places[:, 1] = np.cumsum([0, *counts])[:-1], np.arange(len(counts))
    return places
