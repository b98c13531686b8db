"""Parquet files with large row groups are read by number from a copy of columns, made once."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcore import DataError
from distcore_data import IndexedRows, read_records, room, skipping
from distcore_data.formats import arrow_columns, arrow_rows
from distcore_data.indexes import copies
from distcore_data.indexes.drafts import Draft

ROWS, LARGE = 5000, 2000
ASKED = {"columns.text": "text", "columns.label": "meta.label"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "LARGE", LARGE)


def written(file: Path, texts: Any = None, group: int = ROWS) -> Path:
    columns = {
        "other": [b"x" * 100] * ROWS,
        "text": texts or [f"text {row}" for row in range(ROWS)],
        "meta": [{"label": row % 7} for row in range(ROWS)],
    }
    pq.write_table(pa.table(columns), file, row_group_size=group)
    return file


def made(tmp_path: Path) -> list[Path]:
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
    assert len(made(tmp_path)) == (1 if group > LARGE else 0), "of one content"
    assert all(file.stat().st_size < ROWS * 100 for file in made(tmp_path)), (
        "other columns are left out"
    )


def test_a_copy_is_made_once_and_of_other_columns_anew(tmp_path: Path) -> None:
    rows = IndexedRows(written(tmp_path / "a.parquet"), ASKED)
    assert rows[[4999]] == [("text 4999", 4999 % 7)]
    [copy] = made(tmp_path)
    before = copy.stat().st_mtime_ns
    some = [0, 1023, 1024]
    assert IndexedRows(tmp_path / "a.parquet", ASKED)[some] == [
        (f"text {row}", row % 7) for row in some
    ]
    assert [file.stat().st_mtime_ns for file in made(tmp_path)] == [before]
    assert IndexedRows(tmp_path / "a.parquet", {"columns.text": "other"})[[7]] == [(b"x" * 100,)]
    assert len(made(tmp_path)) == 2


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
    assert not made(tmp_path)


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


def test_copies_are_bounded_and_those_that_were_not_read_for_longest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [written(tmp_path / f"{name}.parquet", [name * 20] * ROWS) for name in "abc"]
    a, b, c = (IndexedRows(source, ASKED) for source in sources)
    assert a[[4999]] == [("a" * 20, 4999 % 7)]
    [first] = made(tmp_path)
    size = first.stat().st_size
    monkeypatch.setenv(room.LIMIT, str(size * 3 // 2))
    assert b[[0]] == [("b" * 20, 0)]
    [second] = made(tmp_path)
    assert second != first
    assert a[[4999]] == [("a" * 20, 4999 % 7)], "made again"
    assert made(tmp_path) == [first]
    monkeypatch.setenv(room.LIMIT, str(size * 5 // 2))
    b[[0]]
    a[[1]]
    c[[2]]
    assert len(made(tmp_path)) == 2
    assert first in made(tmp_path), "it was made before the second, and read after it"
    monkeypatch.setenv(room.LIMIT, str(size // 2))
    with pytest.raises(
        DataError,
        match=r"^data file \S+/b.parquet: its rows are copied to be read by number, and the copy"
        r" takes more than the \d+ bytes of the cache \S+; raise DISTCORE_REMOTE_BYTES, or write"
        r" row groups of at most \d+ rows, which are not copied$",
    ):
        b[[0]]
    assert not list(first.parent.glob(".*.arrow")), "no draft is left"


def test_copies_and_remote_files_have_one_room_which_counts_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IndexedRows(written(tmp_path / "a.parquet"), ASKED)[[0]]
    [copy], taken = made(tmp_path), tmp_path / "cache/remote" / room.TAKEN
    size = copy.stat().st_size
    assert taken.read_text() == str(size)
    remote = tmp_path / "cache/remote/version/rows.txt"
    remote.parent.mkdir()
    monkeypatch.setenv(room.LIMIT, str(size + 999))
    room.reserve(remote, 1000)
    room.draft_of(remote).rename(remote)
    assert not made(tmp_path), "it made room"
    monkeypatch.setenv(room.LIMIT, str(size * 2))
    monkeypatch.setattr("distcore_data.indexes.drafts.BUFFER", 2**15)
    seen, write = list[int](), Draft._write_buffer

    def writing(draft: Draft) -> None:
        write(draft)
        seen.append(int(taken.read_text()) - room.draft_of(copy).stat().st_size)

    monkeypatch.setattr(Draft, "_write_buffer", writing)
    IndexedRows(tmp_path / "a.parquet", ASKED)[[0]]
    assert made(tmp_path) == [copy]
    assert len(seen) > 2
    assert set(seen) == {1000}, "what the remote file takes"
    assert taken.read_text() == str(size + 1000)
    copy.unlink()
    monkeypatch.setenv(room.LIMIT, str(size // 2))
    with pytest.raises(DataError, match=r"the copy takes more than the \d+ bytes of the cache"):
        IndexedRows(tmp_path / "a.parquet", ASKED)[[0]]
    assert not [file for file in copy.parent.iterdir() if file.suffix != room.LOCK]
