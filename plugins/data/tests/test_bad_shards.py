"""Shards that cannot be used: one line with the shard and the row, and never some of
the rows in silence.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import check_source, read_records

COLUMNS = {"columns.text": "text", "columns.label": "label"}
ROWS = shards.texts(8)
RECORDS = [(row["text"], row["label"]) for row in ROWS]


def problem_of(source: Path, columns: dict[str, str] = COLUMNS) -> str | None:
    """Return the line for a source that cannot be used; nothing for one with all rows."""
    try:
        check_source(source)
        records = list(read_records(source, columns))
    except DataError as error:
        return str(error)
    assert records == RECORDS
    return None


def refused(source: Path, columns: dict[str, str] = COLUMNS) -> str:
    """Return the line for a source that cannot be used."""
    line = problem_of(source, columns)
    assert line is not None
    assert "\n" not in line
    return line


def shard_of(source: Path) -> Path:
    """Return the second file of several."""
    files = (
        sorted(file for file in source.glob("*") if file.name != "index.json")
        if source.is_dir()
        else [source]
    )
    return files[min(1, len(files) - 1)]


@pytest.mark.programs
@pytest.mark.parametrize("form", [*shards.FORMS, "tar.gz"])
def test_a_shard_that_ends_anywhere_is_refused(tmp_path: Path, form: str) -> None:
    if form == "tar.gz":
        source = shards.tar(tmp_path / "a.tar.gz", shards.members(ROWS))
    else:
        source = shards.written(tmp_path / "rows", form, ROWS)
    shard = shard_of(source)
    content = shard.read_bytes()
    for size in range(1, len(content), 37):
        shard.write_bytes(content[:size])
        line = problem_of(source)  # none where only the empty end of a tar file is missing
        assert line is None or re.match(rf"data file {re.escape(str(shard))}\b[^\n]*$", line)
    shard.write_bytes(content[: len(content) // 3])
    refused(source)


@pytest.mark.parametrize("form", ["tar", "mds", "mds zstd", "litdata values", "arrow stream"])
def test_the_line_for_a_cut_shard_has_the_row(tmp_path: Path, form: str) -> None:
    source = shards.written(tmp_path / "rows", form, ROWS)
    shard = shard_of(source)
    content = shard.read_bytes()
    at = content.find(b"row 4") + 3 if b"row 4" in content else len(content) - 9
    shard.write_bytes(content[: 900 if form == "arrow stream" else at])
    line = refused(source)
    expected = {
        "tar": "row 2: 1/1.txt has 15 bytes, of which",
        "mds": "row 2: the shard ends within this row: ",
        "litdata values": "row 2: the shard ends within this row: ",
        "mds zstd": r"row \d: ",
        "arrow stream": "cannot be read after row [246]: ",
    }
    assert re.search(f"{shard.name}(, |: ){expected[form]}", line), line


def test_a_tar_row_without_a_member_that_others_have_is_named(tmp_path: Path) -> None:
    rows = shards.members(ROWS[:3])
    del rows[1]["cls"]
    line = refused(shards.tar(tmp_path / "a.tar", rows))
    assert line.endswith(
        "a.tar, row 2: 000001 has no member or JSON key 'label', which the rows before have"
    )
    del rows[0]["cls"]
    assert re.search(
        r"row 1: no column 'label' \(found: __key__, txt, text\)",
        refused(shards.tar(tmp_path / "b.tar", rows)),
    )


TARS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "json": ([{"json": b"{"}], "row 1: 000000.json cannot be read: Expecting property name"),
    "utf-8": (
        [{"txt": b"a", "cls": b"1"}, {"txt": b"\xff", "cls": b"1"}],
        "row 2: 000001.txt cannot be read: 'utf-8'",
    ),
    "twice": (
        [{"__key__": "a", "txt": b"", "cls": b"1"}, {"__key__": "a", "cls": b"1"}],
        "row 1: has two members a",
    ),
    "apart": (
        [{"__key__": key, "txt": b"", "cls": b"1"} for key in "aba"],
        "row 3: an earlier row has its key, a, too; write the members of a key one after the other",
    ),
    "no key": ([{"__key__": "__meta__", "json": b"{}"}], "holds no members named KEY.EXTENSION"),
}


@pytest.mark.parametrize("case", TARS)
def test_a_tar_row_that_cannot_be_used_is_named(tmp_path: Path, case: str) -> None:
    rows, problem = TARS[case]
    assert problem in refused(shards.tar(tmp_path / "a.tar", rows))


def test_a_shard_that_is_no_tar_file_is_one_line(tmp_path: Path) -> None:
    for content in (b"text " * 200, b"text"):
        (tmp_path / "a.tar").write_bytes(content)
        assert "a.tar, row 1: not a tar file, or damaged: " in refused(tmp_path / "a.tar")


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_a_byte_of_a_header_that_has_changed_is_noticed(tmp_path: Path, form: int) -> None:
    content = shards.tar(tmp_path / "a.tar", [{"txt": b"a", "cls": b"1"}] * 3, form).read_bytes()
    for place in (0, 99, 100, 124, 134, 148, 153, 156, 257, 263, 345, 511):
        header = 2 * 1024 + place  # of the third member
        (tmp_path / "a.tar").write_bytes(
            content[:header] + bytes([content[header] ^ 1]) + content[header + 1 :]
        )
        assert "not a tar file, or damaged: bad checksum" in refused(tmp_path / "a.tar")
