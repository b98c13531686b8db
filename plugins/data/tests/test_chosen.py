"""Rows chosen by a bit each: those that a read from the start yields, by their numbers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_cases as shards
from bad_row_cases import COLUMNS, LINES, SHARDS, three_shards

from distcore import DataError
from distcore_data import (
    ChosenRows,
    Filtered,
    IndexedRows,
    Source,
    choose_rows,
    read_records,
    skipping,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_the_numbers_of_chosen_rows(share: float) -> None:
    numbers = np.flatnonzero(np.random.default_rng(0).random(20_001) < share)
    for chosen in (
        ChosenRows.from_numbers(20_001, numbers),
        ChosenRows.from_numbers(20_001, iter(numbers.tolist())),
    ):
        assert len(chosen) == len(numbers)
        assert chosen[np.arange(len(numbers))].tolist() == numbers.tolist()
        some = np.random.default_rng(1).integers(0, max(1, len(numbers)), 50 * bool(len(numbers)))
        assert chosen[some].tolist() == numbers[some].tolist()
        # read in one go
        near = np.arange(len(numbers))[len(numbers) // 3 : len(numbers) // 3 + 900][::-1]
        assert chosen[near].tolist() == numbers[near].tolist()
        for row in (0, 1, 4095, 4096, 4097, 20_001):
            assert chosen.before(row) == np.count_nonzero(numbers < row)


def check(source: Source, most_bad_rows: int) -> list[str]:
    """The chosen rows by number are the records; return the problems of others."""
    with skipping(most_bad_rows) as bad:
        records = list(read_records(source, COLUMNS))
    with skipping(most_bad_rows) as again:
        chosen = choose_rows(source, COLUMNS)
    assert [*again.problems] == [*bad.problems]
    rows = IndexedRows(
        source.source if isinstance(source, Filtered) else source, COLUMNS, whole=False
    )
    assert rows[chosen[np.arange(len(chosen))]] == records
    return [*bad.problems]


@pytest.mark.parametrize("write", LINES)
def test_bad_rows_are_not_chosen(write: type, tmp_path: Path) -> None:
    assert len(check(write(tmp_path), 2)) == 2


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_tar_row_with_the_key_of_another_is_not_chosen(name: str, tmp_path: Path) -> None:
    rows = [{"__key__": key, "txt": b"red", "cls": b"1"} for key in "abcbd"]
    file = shards.tar(tmp_path / name, rows)
    with pytest.raises(DataError, match=rf"{name}, row 4: an earlier row has its key, b, too"):
        IndexedRows(file, COLUMNS)
    assert len(check(file, 1)) == 1
    assert len(IndexedRows(file, COLUMNS, whole=False)) == 5


@pytest.mark.programs
@pytest.mark.parametrize("form", SHARDS)
def test_the_rest_of_a_cut_shard_is_not_chosen(form: str, tmp_path: Path) -> None:
    source, files = three_shards(tmp_path, form)
    files[1].write_bytes(files[1].read_bytes()[: files[1].stat().st_size * 2 // 3])
    for _ in range(2):  # the second time its index is known
        assert len(check(source, 1)) == 1
    if not form.startswith(("mds", "litdata")):  # whose index says what each shard has
        with pytest.raises(DataError, match=files[1].name):
            IndexedRows(source, COLUMNS)
    again = pickle.loads(pickle.dumps(IndexedRows(source, COLUMNS, whole=False)))
    if not form.startswith(("mds", "litdata")):
        with skipping(1):
            assert len(again) == len(list(read_records(source, COLUMNS)))
    assert again[[0, len(again) - 1]] == [("row 0 0", again[[0]][0][1]), again[[len(again) - 1]][0]]


def test_a_damaged_row_group_is_not_chosen(tmp_path: Path) -> None:
    """Its rows are no other ones: those of the next group keep their numbers."""
    file = tmp_path / "rows.parquet"
    rows = [{"text": f"row {number}", "label": number % 2} for number in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=500)
    group = pq.ParquetFile(file).metadata.row_group(1).column(0)
    content, start = (
        bytearray(file.read_bytes()),
        group.dictionary_page_offset or group.data_page_offset,
    )
    content[start : start + group.total_compressed_size] = bytes(group.total_compressed_size)
    file.write_bytes(content)
    (problem,) = check(file, 1)
    assert "rows 501 to 1000" in problem
    indexed = IndexedRows(file, COLUMNS)
    assert indexed[[499, 1000]] == [("row 499", 1), ("row 1000", 0)]
    for number in (500, 700, 999):
        with pytest.raises(DataError, match="rows 501 to 1000"):
            indexed[[number]]


@pytest.mark.parametrize("form", shards.FORMS)
def test_rows_that_a_filter_keeps(form: str, tmp_path: Path) -> None:
    source = shards.written(tmp_path / "rows", form, shards.texts(50))
    assert not check(Filtered(source, "text", "row .[37]"), 0)


def test_a_filter_that_keeps_nothing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a", "label": 0}))
    with pytest.raises(
        DataError, match=r"rows.jsonl: text of no row matches 'b'; change filter.matches$"
    ):
        choose_rows(Filtered(tmp_path / "rows.jsonl", "text", "b"), COLUMNS)
