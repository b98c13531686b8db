"""A format of another distribution is read as those that are here: its reader is an entry point of
``distcore.readers`` with the name of the extension.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from work_folder import install

from distcore import DataError
from distcore_data import IndexedRows, data_format, read_records, source_digest
from distcore_data.indexes import entries

COLUMNS = {"columns.text": "text", "columns.label": "label"}
READER = """
from distcore import DataError

def read(source, columns):
    for number, line in enumerate(source.read_text().split()):
        text, _, label = line.partition("=")
        row = {"text": text, "label": int(label)}
        if absent := [name for name in columns.values() if name not in row]:
            raise DataError(f"{source}: no column {absent[0]}")
        yield tuple(row[name] for name in columns.values())

def digest(source):
    return "theirs"
"""


@pytest.fixture(autouse=True)
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "SETTLED", 0)
    site = tmp_path / "site"
    site.mkdir()
    install(site, "their-format", "[distcore.readers]\npairs = their_pairs\n")
    (site / "their_pairs.py").write_text(READER)
    monkeypatch.syspath_prepend(site)


def written(folder: Path) -> Path:
    file = folder / "rows.pairs"
    file.write_text("".join(f"text{row}={row}\n" for row in range(90)))
    return file


def test_its_rows_are_read_in_order_and_by_number(tmp_path: Path) -> None:
    file = written(tmp_path)
    expected = [(f"text{row}", row) for row in range(90)]
    assert list(read_records(file, COLUMNS)) == expected
    rows = IndexedRows(file, COLUMNS)
    assert len(rows) == 90
    assert rows[[80, 3, 80]] == [expected[80], expected[3], expected[80]]
    assert source_digest(file) == hashlib.sha256(file.read_bytes()).hexdigest() + ".pairs"


def test_its_files_are_found_in_a_folder_among_others(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows")
    (tmp_path / "rows/notes.md").write_text("no rows")
    assert data_format(tmp_path / "rows") == ".pairs"
    assert len(list(read_records(tmp_path / "rows", COLUMNS))) == 90


def test_its_errors_are_those_of_its_reader(tmp_path: Path) -> None:
    columns = {"columns.text": "summary"}
    with pytest.raises(DataError, match=r"rows.pairs: no column summary$"):
        list(read_records(written(tmp_path), columns))
    with pytest.raises(DataError, match=r"rows.pairs: no column summary$"):
        IndexedRows(written(tmp_path), columns)[[5]]


def test_without_it_the_extension_is_unknown_and_with_it_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.md").write_text("no rows")
    with pytest.raises(
        DataError, match=r"unknown extension '.md' \(known: .*, .tar, .pairs, .list"
    ):
        list(read_records(tmp_path / "notes.md", COLUMNS))
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "pairs")
    with pytest.raises(DataError, match=r"unknown extension '.pairs'"):
        list(read_records(written(tmp_path), COLUMNS))
