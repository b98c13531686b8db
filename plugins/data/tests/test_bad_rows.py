"""Rows that cannot be read or lack a column: refused, or passed over up to a number, and listed."""

from __future__ import annotations

from pathlib import Path

import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import read_records, skipping

COLUMNS = {"columns.text": "text", "columns.label": "label"}


def jsonl(folder: Path) -> Path:
    rows = ['{"text": "a", "label": 0}', '{"text": "b"', '{"text": "c", "label": 1}', '{"text": "d"}', '["e", 0]']
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def csv(folder: Path) -> Path:
    (folder / "rows.csv").write_text("text,label\na,0\nb,1,2\nc,1\nd\ne,0\n")
    return folder / "rows.csv"


def array(folder: Path) -> Path:
    (folder / "rows.json").write_text('[["a", 0], ["b"], ["c", 1], 7, ["e", 0]]')
    return folder / "rows.json"


def tar(folder: Path) -> Path:
    rows = [{"txt": b"a", "cls": b"0"}, {"txt": b"b"}, {"txt": b"c", "cls": b"1"}, {"txt": b"\xff", "cls": b"0"},
            {"txt": b"e", "cls": b"0"}]  # fmt: skip
    return shards.tar(folder / "rows.tar", rows)


LINES = {
    jsonl: ["line 2, column 13: not valid JSON", "row 4: no column 'label'"],
    csv: ["row 2: expected 2 values as in the header, found 3", "row 4: expected 2 values as in the header, found 1"],
    array: ["row 2: expected [text, label] or", "row 4: expected [text, label] or"],
    tar: [
        "row 2: 000001 has no member or JSON key 'label'",
        "row 4: 000003.txt cannot be read: 'utf-8' codec can't decode",
    ],
}


@pytest.mark.parametrize("write", LINES)
def test_bad_rows_are_passed_over_and_listed(write: type, tmp_path: Path) -> None:
    source = write(tmp_path)
    with skipping(2) as bad:
        for _ in range(2):  # rows are read more than once
            assert [text for text, _ in read_records(source, COLUMNS)] == ["a", "c", "e"]
    for line, expected in zip(bad.problems, LINES[write], strict=True):
        assert line.startswith(f"data file {source}, {expected}")


@pytest.mark.parametrize("write", LINES)
def test_one_more_is_one_line_and_without_the_word_the_first_is(write: type, tmp_path: Path) -> None:
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


def test_a_file_that_ends_inside_a_row_is_refused_all_the_same(tmp_path: Path) -> None:
    source = tar(tmp_path)
    source.write_bytes(source.read_bytes()[:3000])
    with skipping(9), pytest.raises(DataError, match=r"row \d: .*a part of the tar file is missing"):
        list(read_records(source, COLUMNS))
