"""Parquet files with one large row group are read by number from a copy in pieces, made once."""

from __future__ import annotations

import re
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcore import DataError
from distcore_data import IndexedRows, read_records, room, skipping
from distcore_data.formats import arrow_columns, arrow_rows
from distcore_data.indexes import pieces

ROWS, LARGE = 5000, 2000
ASKED = {"columns.text": "text", "columns.label": "meta.label"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pieces, "LARGE", LARGE)
    pieces._copied.cache_clear()
    monkeypatch.setattr(room, "HELD", Counter())


def written(file: Path, texts: Any = None, group: int = ROWS) -> Path:
    columns = {
        "other": [b"x" * 100] * ROWS,
        "text": texts or [f"text {row}" for row in range(ROWS)],
        "meta": [{"label": row % 7} for row in range(ROWS)],
    }
    pq.write_table(pa.table(columns), file, row_group_size=group)
    return file


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/remote/pieces").glob("[!.]*.arrow"))


@pytest.mark.parametrize("group", [ROWS, 3000, LARGE])
def test_rows_of_a_large_group_are_those_of_the_file(group: int, tmp_path: Path) -> None:
    files = [written(tmp_path / name, group=group) for name in ("a.parquet", "b.parquet")]
    rows = IndexedRows(tmp_path / "*.parquet", ASKED)
    expected = [record for file in files for record in read_records(file, ASKED)]
    assert len(rows) == len(expected)
    chosen = np.random.default_rng(0).permutation(len(rows))[:500]
    assert rows[chosen] == [expected[row] for row in chosen]
    assert rows[range(1000, 1100)] == expected[1000:1100]
    assert len(copies(tmp_path)) == (1 if group > LARGE else 0), "of one content"
    assert all(file.stat().st_size < ROWS * 100 for file in copies(tmp_path)), (
        "other columns are left out"
    )


def test_a_copy_is_made_once_and_of_other_columns_anew(tmp_path: Path) -> None:
    rows = IndexedRows(written(tmp_path / "a.parquet"), ASKED)
    assert rows[[4999]] == [("text 4999", 4999 % 7)]
    [made] = copies(tmp_path)
    before = made.stat().st_mtime_ns
    pieces._copied.cache_clear()
    some = [0, 1023, 1024]
    assert IndexedRows(tmp_path / "a.parquet", ASKED)[some] == [
        (f"text {row}", row % 7) for row in some
    ]
    assert [file.stat().st_mtime_ns for file in copies(tmp_path)] == [before]
    assert IndexedRows(tmp_path / "a.parquet", {"columns.text": "other"})[[7]] == [(b"x" * 100,)]
    assert len(copies(tmp_path)) == 2


def test_a_value_that_is_no_text_is_named_by_the_file_that_the_user_has(tmp_path: Path) -> None:
    texts = pa.array([b"a"] * 2500 + [b"\xff"] + [b"c"] * 2499).view(pa.string())
    rows = IndexedRows(written(tmp_path / "a.parquet", texts), ASKED)
    with pytest.raises(
        DataError, match=re.escape(f"data file {tmp_path}/a.parquet, row 2501: ") + ".*can't decode"
    ):
        rows[[2500]]
    assert rows[[2499, 2501]] == [("a", 2499 % 7), ("c", 2501 % 7)]


def test_a_file_with_a_damaged_group_is_not_copied(tmp_path: Path) -> None:
    file = written(tmp_path / "a.parquet", group=2500)
    whole = list(read_records(file, ASKED))
    column = pq.ParquetFile(file).metadata.row_group(1).column(1)
    content, start = (
        bytearray(file.read_bytes()),
        column.dictionary_page_offset or column.data_page_offset,
    )
    content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    file.write_bytes(content)
    rows = IndexedRows(file, ASKED)
    assert rows[[0, 2499]] == [whole[0], whole[2499]]
    with pytest.raises(
        DataError, match=r"a.parquet, rows 2501 to 5000: not a readable Parquet file: "
    ):
        rows[[2500]]
    with skipping(1):
        assert list(read_records(file, ASKED)) == whole[:2500]
    assert not copies(tmp_path)


def test_a_row_costs_the_same_wherever_it_is_and_few_rows_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = IndexedRows(written(tmp_path / "a.parquet"), ASKED)
    rows[[0]]
    monkeypatch.setattr(
        arrow_columns, "decoded", lambda *_: pytest.fail("some rows are decoded together")
    )
    tracemalloc.start()
    start = time.process_time()
    for row in (0, 2500, 4999):
        rows[[row]]
    assert time.process_time() - start < 0.5
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_row_may_lie_in_a_later_batch_than_its_part_begins_with(tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"text": [f"{batch} {row}" for row in range(10)]}) for batch in range(3)
    ]
    with pa.ipc.new_file(tmp_path / "a.arrow", batches[0].schema) as file:
        for batch in batches:
            file.write(batch)
    asked, parts, rows = {"columns.text": "text"}, np.array([0, 0, 0, 1]), np.array([3, 12, 29, 15])
    taken = arrow_rows.take_arrow(tmp_path / "a.arrow", asked, parts, rows)
    assert taken == [("0 3",), ("1 2",), ("2 9",), ("2 5",)]


def test_copies_are_bounded_and_those_of_other_runs_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (written(tmp_path / name, [name * 20] * ROWS) for name in ("a.parquet", "b.parquet"))
    first = IndexedRows(one, ASKED)
    assert first[[4999]] == [("a.parquet" * 20, 4999 % 7)]
    [copy] = copies(tmp_path)
    monkeypatch.setenv(room.LIMIT, str(copy.stat().st_size * 3 // 2))
    with pytest.raises(
        DataError, match=r"the copies of a run take more than .* bytes; raise DISTCORE_REMOTE_BYTES"
    ):
        IndexedRows(two, ASKED)[[0]]
    assert copies(tmp_path) == [copy]
    room.HELD.clear()  # as in another run
    assert IndexedRows(two, ASKED)[[0]] == [("b.parquet" * 20, 0)]
    assert len(copies(tmp_path)) == 1
    assert copies(tmp_path) != [copy]
    room.HELD.clear()
    assert first[[4999]] == [("a.parquet" * 20, 4999 % 7)], "made again"
    assert copies(tmp_path) == [copy]
    monkeypatch.setenv(room.LIMIT, str(copy.stat().st_size * 5 // 2))
    IndexedRows(two, ASKED)[[0]]
    del room.HELD[next(other for other in copies(tmp_path) if other != copy)]
    IndexedRows(written(tmp_path / "c.parquet", ["c.parquet" * 20] * ROWS), ASKED)[[0]]
    assert len(copies(tmp_path)) == 2
    assert copy in copies(tmp_path), "it is older, but read"


def test_copies_and_remote_files_have_one_room_which_counts_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IndexedRows(written(tmp_path / "a.parquet"), ASKED)[[0]]
    [copy], taken = copies(tmp_path), tmp_path / "cache/remote" / room.TAKEN
    size = copy.stat().st_size
    assert taken.read_text() == str(size)
    remote = tmp_path / "cache/remote/version/rows.txt"
    remote.parent.mkdir()
    room.HELD.clear()
    monkeypatch.setenv(room.LIMIT, str(size + 999))
    room.reserve(remote, 1000)
    room.draft_of(remote).rename(remote)
    assert not copies(tmp_path), "it made room"
    monkeypatch.setenv(room.LIMIT, str(size * 2))
    seen, write = list[int](), pieces._reserve

    def reserved(made: Path, size: int, has: int) -> int:
        size = write(made, size, has)
        seen.append(int(taken.read_text()) - room.draft_of(made).stat().st_size)
        return size

    monkeypatch.setattr(pieces, "_reserve", reserved)
    IndexedRows(tmp_path / "a.parquet", ASKED)[[0]]
    assert copies(tmp_path) == [copy]
    assert len(seen) > 1
    assert set(seen) == {1000}, "what the remote file takes"
    assert taken.read_text() == str(size + 1000)
    pieces._copied.cache_clear()
    copy.unlink()
    room.HELD.clear()
    monkeypatch.setenv(room.LIMIT, str(size // 2))
    with pytest.raises(DataError, match=r"the copies of a run take more than .* bytes"):
        IndexedRows(tmp_path / "a.parquet", ASKED)[[0]]
    assert not [file for file in copy.parent.iterdir() if file.suffix != room.LOCK]
