"""Rows that cannot be read or lack a column: refused, or passed over up to a number, and listed."""

from __future__ import annotations

import errno
import io
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_row_cases import COLUMNS, LINES, SHARDS, csv, jsonl, three_shards

from distcore import DataError
from distcore_data import read_records, skipping


@pytest.mark.parametrize("write", LINES)
def test_bad_rows_are_passed_over_and_listed(write: type, tmp_path: Path) -> None:
    source = write(tmp_path)
    with skipping(2) as bad:
        for _ in range(2):  # rows are read more than once
            assert [text for text, _ in read_records(source, COLUMNS)] == ["a", "c", "e"]
    for line, expected in zip(bad.problems, LINES[write], strict=True):
        assert line.startswith(f"data file {source}, {expected}")


@pytest.mark.parametrize("write", LINES)
def test_one_bad_row_more_than_allowed_is_one_line_and_the_first_where_none_is_allowed(
    write: type, tmp_path: Path
) -> None:
    source = write(tmp_path)
    with skipping(1), pytest.raises(DataError) as error:
        list(read_records(source, COLUMNS))
    assert str(error.value).startswith(f"data file {source}, {LINES[write][1]}")
    assert str(error.value).endswith("; more bad rows than the 1 of --skip-bad-rows")
    with pytest.raises(DataError) as error:
        list(read_records(source, COLUMNS))
    assert str(error.value).startswith(f"data file {source}, {LINES[write][0]}")
    assert "--skip-bad-rows" not in str(error.value)


def test_the_number_is_of_all_files(tmp_path: Path) -> None:
    with skipping(3):
        list(read_records(csv(tmp_path), COLUMNS))
        with pytest.raises(DataError, match=r"rows\.jsonl, row 4: .*more bad rows than the 3 of"):
            list(read_records(jsonl(tmp_path), COLUMNS))


@pytest.mark.programs
@pytest.mark.parametrize("form", SHARDS)
def test_a_cut_shard_loses_its_last_rows_and_no_other_ones(form: str, tmp_path: Path) -> None:
    source, files = three_shards(tmp_path, form)
    whole = [text for text, _ in read_records(source, COLUMNS)]
    files[1].write_bytes(files[1].read_bytes()[: files[1].stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=re.escape(files[1].name)) as error:
        list(read_records(source, COLUMNS))
    with skipping(1) as bad:
        kept, again = ([text for text, _ in read_records(source, COLUMNS)] for _ in range(2))
    (line,) = bad.problems
    assert line == f"{error.value}; the rest of this file is passed over"
    assert kept == again
    left = len(kept) - 4000
    assert 0 <= left < 2000
    assert kept == whole[: 2000 + left] + whole[4000:]
    # no index at the end
    if form in ("tar", "tar.gz", "jsonl.gz", "csv.gz", "mds", "litdata values", "arrow stream"):
        assert left > 0


def test_a_damaged_row_group_loses_its_own_rows(tmp_path: Path) -> None:
    source, files = three_shards(tmp_path, "parquet")
    whole = [text for text, _ in read_records(source, COLUMNS)]
    group = pq.ParquetFile(files[1]).metadata.row_group(2).column(0)
    content, start = (
        bytearray(files[1].read_bytes()),
        group.dictionary_page_offset or group.data_page_offset,
    )
    content[start : start + group.total_compressed_size] = bytes(group.total_compressed_size)
    files[1].write_bytes(content)
    with skipping(1) as bad:
        kept = [text for text, _ in read_records(source, COLUMNS)]
    assert kept == whole[:3000] + whole[3500:]
    (line,) = bad.problems
    assert line.startswith(
        f"data file {files[1]}, rows 1001 to 1500: not a readable Parquet file: "
    )


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_value_that_is_no_text_loses_its_row(form: str, tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    table = pa.table({"text": texts, "label": [0, 1, 0]})
    if form == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
            file.write(table)
    with skipping(1) as bad:
        assert list(read_records(tmp_path / f"rows.{form}", COLUMNS)) == [("a", 0), ("c", 0)]
    assert next(iter(bad.problems)).startswith(
        f"data file {tmp_path}/rows.{form}, row 2: 'utf-8' codec can't decode"
    )


def test_a_source_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{\n[\n")
    with (
        skipping(9),
        pytest.raises(DataError, match=r"rows\.jsonl, line 1, column 2: not valid JSON: [^;]*$"),
    ):
        list(read_records(tmp_path / "rows.jsonl", COLUMNS))


def test_a_file_that_the_disk_does_not_give_is_no_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, file: object) -> io.BytesIO:
        raise OSError(errno.EIO, "Input/output error")

    source = jsonl(tmp_path)
    monkeypatch.setattr("distcore_data.formats.opening.open_bytes", failing)
    with skipping(9), pytest.raises(DataError, match="cannot be read: Input/output error"):
        list(read_records(source, COLUMNS))
