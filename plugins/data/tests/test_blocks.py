"""Rows that are cut out of what is between two places of an index are those of a read from the
start, and so are the errors of bad ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distcore import DataError
from distcore_data import IndexedRows
from distcore_data.formats import blocks
from distcore_data.formats.columns import RowError
from distcore_data.formats.reading import read_rows
from distcore_data.indexes import entries

COUNT = 100
BOM = "\ufeff"


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "SETTLED", 0)


def json_lines(end: str = "\n") -> str:
    rows = [{"text": f"grün {row}\u2028\x85", "label": row} for row in range(COUNT)]
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def table(end: str = "\n", value: str = "text {row}") -> str:
    rows = [f"{value.format(row=row)},{row}" for row in range(COUNT)]
    return "".join(line + end for line in ["text,label", *rows])


FILES = {
    "plain.jsonl": json_lines(),
    "windows.jsonl": BOM + json_lines("\r\n"),
    "blank.jsonl": "\n" + json_lines("\n\u3000 \n\n").rstrip("\n"),
    "spaced.jsonl": json_lines("\n  ").removesuffix("\n  "),
    "blank after the first.jsonl": BOM + json_lines().replace("\n", "\n\n", 1),
    "bad.jsonl": json_lines()
    .replace('"label": 40', '"label": ')
    .replace('"label": 70}', '"l": 1}'),
    "twice.jsonl": json_lines().replace('"label": 99', '"label": 99, "label": 3'),
    "lists.jsonl": "".join(f'["text {row}", {row}]\n' for row in range(COUNT)),
    "other.jsonl": "".join(f"{row}\n" for row in range(COUNT)),
    "plain.txt": "".join(f"text {row} \n" for row in range(COUNT)),
    "blank.txt": BOM + "".join(f" {BOM}text {row}\r\n \x85\x1c\n" for row in range(COUNT)),
    "plain.csv": table(),
    "windows.csv": BOM + table("\r\n"),
    "old mac.csv": table("\r"),
    "mixed.csv": table("\n").replace("text 50,50\n", "text\r50,50\n"),
    "blank.csv": "\n" + table("\n\n").rstrip("\n"),
    "space.csv": table("\n \n"),
    "quoted.csv": table(value='"a ""line""\nand, {row}\r\n"'),
    "quote inside.csv": table(value='5" {row}'),
    "semicolons.csv": table().replace(",", ";"),
    "bad.csv": table().replace("text 40,40", "text 40").replace("text 50,50", "text,label"),
    "never closed.csv": table().replace("text 90,", '"text 90,'),
    "wrongly quoted.csv": table().replace("text 90,", '"text" 90,'),
}
"""Names of files to their content."""
LABELED = {"columns.text": "text", "columns.label": "label"}
TEXT = {"columns.text": "text", "columns.label?": "label"}


def told(source: Path, number: int, rows: IndexedRows) -> object:
    """The row of a number, or what is wrong with it."""
    try:
        [row] = rows[[number]]
    except DataError as error:
        return str(error)
    return row


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("span", [blocks.SPAN, 700, 0])
def test_rows_and_errors_are_those_of_a_reader(
    name: str, span: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small span, as of long rows, they are read line by line."""
    monkeypatch.setattr(blocks, "SPAN", span)
    source = tmp_path / name
    source.write_bytes(FILES[name].encode())
    columns = TEXT if source.suffix == ".txt" else LABELED
    read = list(read_rows(source, columns))
    rows = IndexedRows(source, columns)
    expected = [str(row) if isinstance(row, RowError) else row for row in read]
    assert len(rows) == len(expected) >= 90
    assert [told(source, number, rows) for number in range(len(rows))] == expected
    good = [number for number, row in enumerate(read) if not isinstance(row, RowError)]
    for some in (good[3:40], good[::-7], good[:2] * 3):
        assert rows[some] == [expected[number] for number in some]


def test_rows_are_cut_out_and_not_read_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = [name for name in FILES if name not in ("never closed.csv", "wrongly quoted.csv")]
    monkeypatch.setattr(IndexedRows, "_each", lambda *_: pytest.fail("read line by line"))
    for name in cut:
        (tmp_path / name).write_bytes(FILES[name].encode())
        rows = IndexedRows(tmp_path / name, TEXT if name.endswith("txt") else LABELED)
        for number in (0, 31, 32, len(rows) - 1):
            told(tmp_path / name, number, rows)


def test_a_column_that_a_file_does_not_have_is_named(tmp_path: Path) -> None:
    for name, message in {
        "plain.csv": "no column 'summary' .found: text, label.; name it with --set",
        "plain.txt": "a .txt file has texts alone, no column 'summary'",
        "plain.jsonl": "row 6: no column 'summary'",
    }.items():
        (tmp_path / name).write_text(FILES[name])
        rows = IndexedRows(tmp_path / name, {"columns.summary": "summary"})
        with pytest.raises(DataError, match=f"{name}(: |, ){message}"):
            rows[[5]]


def test_text_that_is_not_utf8_is_named_when_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "plain.jsonl"
    source.write_bytes(json_lines().encode().replace(b"n 40", b"n \xff40"))
    rows = IndexedRows(source, LABELED)
    with pytest.raises(DataError, match=r"plain.jsonl: not UTF-8 text \(byte 0xff at offset \d+\)"):
        rows[[40]]
    assert rows[[39]] == [("grün 39\u2028\x85", 39)]


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path: Path) -> None:
    source = tmp_path / "plain.jsonl"
    source.write_text(json_lines())
    rows = IndexedRows(source, LABELED)
    with source.open("r+b") as file:
        file.truncate(100)
    for number in (40, 70, 99):
        with pytest.raises(DataError, match=r"plain.jsonl: changed while it was read"):
            rows[[number]]


def test_many_rows_of_one_block_are_those_of_each(tmp_path: Path) -> None:
    source = tmp_path / "plain.jsonl"
    source.write_text(json_lines())
    rows = IndexedRows(source, LABELED)
    alone = [rows[[number]][0] for number in range(COUNT)]
    assert rows[range(COUNT)] == alone
    shuffled = np.random.default_rng(0).integers(0, COUNT, 300)
    assert rows[shuffled] == [alone[number] for number in shuffled]
