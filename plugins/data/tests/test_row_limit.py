"""A row over the limit is a bad row in each format: one line with file and row, and the rows
after it are read.
"""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import IndexedRows, read_records, skipping
from distcore_data.formats import scans
from distcore_data.formats.row_limit import LIMIT

COLUMNS = {"columns.text": "text", "columns.label": "label"}
MOST, LONG = 500, 101
"""The limit in tests, and the number of the row over it."""
ROWS: list[dict[str, Any]] = [
    {"text": f"grün {row}" + ' and "more", ' * (100 * (row == LONG)), "label": row % 3}
    for row in range(150)
]


@pytest.fixture(autouse=True)
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(LIMIT, str(MOST))
    monkeypatch.setattr(scans, "BLOCK", 150)


def csv_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    with (folder / "rows.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([["text", "label"], *(row.values() for row in rows)])
    return folder / "rows.csv"


def written(folder: Path, form: str) -> Path:
    if form in shards.FORMS:
        return shards.written(folder / "rows", form, ROWS)
    file = folder / f"rows.{form}"
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" * (1 + row["label"]) for row in ROWS)
    if form == "csv":
        return csv_file(folder, ROWS)
    if form == "tar.gz":
        return shards.tar(file, shards.members(ROWS))
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=70)
    elif form == "txt":
        file.write_text("\n".join(row["text"] for row in ROWS))
    else:
        file.write_bytes(gzip.compress(lines.encode()) if form == "jsonl.gz" else lines.encode())
    return file


@pytest.mark.parametrize(
    "form", ["jsonl", "jsonl.gz", "txt", "csv", "parquet", "tar.gz", *shards.FORMS]
)
def test_a_row_over_the_limit_is_one_line_and_can_be_passed_over(form: str, tmp_path: Path) -> None:
    columns = {"columns.text": "text"} if form == "txt" else COLUMNS
    source = written(tmp_path, form)
    with pytest.raises(DataError) as error:
        list(read_records(source, columns))
    assert f"{'line' if form == 'csv' else 'row'} " in str(error.value)
    assert str(error.value).endswith(f"over the limit of {MOST}; {LIMIT} sets another one")
    with skipping(1) as bad:
        texts = [str(text) for text, *_ in read_records(source, columns)]
    assert [*bad.problems] == [str(error.value)]
    assert texts == [row["text"] for row in ROWS if row is not ROWS[LONG]]
    rows = IndexedRows(source, columns)
    assert len(rows) == len(ROWS)
    assert [text for text, *_ in rows[[LONG - 1, LONG + 1, 149]]] == [
        texts[LONG - 1],
        texts[LONG],
        texts[-1],
    ]
    with pytest.raises(DataError, match="over the limit"):
        rows[[LONG]]


def test_a_text_over_the_limit_loses_its_file(tmp_path: Path) -> None:
    for name, text in {"a": "one", "b": "x" * (MOST + 1), "c": "three"}.items():
        (tmp_path / "rows" / name).mkdir(parents=True)
        (tmp_path / "rows" / name / "1.txt").write_text(text)
    with skipping(1) as bad:
        assert [text for text, _ in read_records(tmp_path / "rows", COLUMNS)] == ["one", "three"]
    assert next(iter(bad.problems)).startswith(
        f"data file {tmp_path}/rows/b/1.txt, row 1: has {MOST + 1} bytes"
    )


@pytest.mark.parametrize("text", ["one\n" * 200, 'one\n"' + "two" * MOST, '"' * 4 + "two" * MOST])
def test_a_csv_value_without_an_end_ends_the_file(text: str, tmp_path: Path) -> None:
    quoted = '"' + text.replace('"', '""') + '"' if text.startswith("one\none") else f'"{text}'
    (tmp_path / "rows.csv").write_text(f"text,label\nbefore,0\n{quoted},1\nafter,1\n")
    with skipping(1) as bad:
        assert list(read_records(tmp_path / "rows.csv", COLUMNS)) == [("before", "0")]
    (line,) = bad.problems
    assert line.endswith(
        f"over the limit of {MOST}; {LIMIT} sets another one; the rest of this file is passed over"
    )


def test_a_list_has_no_limit_because_it_is_in_memory_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert len(list(read_records(tmp_path / "rows.json", COLUMNS))) == len(ROWS)


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "csv"])
def test_a_line_without_end_does_not_fill_the_memory(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "BLOCK", 2**12)
    monkeypatch.setenv(LIMIT, "10000")
    file = tmp_path / f"rows.{suffix}"
    file.write_text("text\n" + "word " * 2**20 + "\nword\n")
    tracemalloc.start()
    try:
        with skipping(9):
            list(read_records(file, {"columns.text": "text"}) if suffix != "jsonl" else [])
        assert len(IndexedRows(file, {"columns.text": "text"})) == (2 if suffix == "csv" else 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_a_limit_that_is_no_number_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "1 GB")
    with pytest.raises(DataError, match=f"^{LIMIT}=1 GB: expected a number of bytes$"):
        list(read_records(written(tmp_path, "jsonl"), COLUMNS))
