"""A format of another distribution is read as those that are here: it is an entry point of
``distcore.readers`` with the name of the extension, or of a kind of folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from work_folder import install

from distcore import DataError, StrategyError
from distcore_data import IndexedRows, data_format, read_records, skipping, source_digest
from distcore_data.formats import installed
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


FOLDERS = """
from distcore_data.formats import INDEX, START, FolderFormat, row_error

def numbers(folder):
    return [int(number) for number in (folder / INDEX).read_text().split()]

def files(folder):
    return [folder / f"{number}.part" for number in numbers(folder)]

def rows_of(folder, columns, place=START):
    file = files(folder)[place.part]
    for number, line in enumerate(file.read_text().split()[place.inner:], place.inner + 1):
        values = {"text": line, "label": len(line)}
        bad = row_error(f"data file {file}", number, "is bad")
        yield bad if line == "bad" else tuple(values[name] for name in columns.values())

def rows(folder):
    return [len(file.read_text().split()) for file in files(folder)]

def is_one(folder):
    return (folder / INDEX).is_file() and (folder / INDEX).read_text()[:1].isdigit()

FORMAT = FolderFormat(
    name="parts", read=None, digest=None, is_one=is_one, read_rows=rows_of, files=files, rows=rows,
    has_index=True,
)
"""


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
        DataError, match=r"unknown extension '.md' \(known: .*, .tar, .txt, .pairs, .tsv, .list"
    ):
        list(read_records(tmp_path / "notes.md", COLUMNS))
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "pairs")
    with pytest.raises(DataError, match=r"unknown extension '.pairs'"):
        list(read_records(written(tmp_path), COLUMNS))


def parts_in(folder: Path, *parts: str) -> Path:
    folder.mkdir()
    for number, rows in enumerate(parts):
        (folder / f"{number}.part").write_text(rows)
    (folder / "index.json").write_text(" ".join(map(str, range(len(parts)))))
    return folder


def their_folders(tmp_path: Path, module: str, source: str) -> None:
    site = tmp_path / "site"
    install(site, "their-folders", f"[distcore.readers]\nfolder.parts = {module}:FORMAT\n")
    (site / f"{module}.py").write_text(source)


def test_a_format_of_folders_is_read_in_order_and_by_number(tmp_path: Path) -> None:
    their_folders(tmp_path, "their_parts", FOLDERS)
    source = parts_in(tmp_path / "rows", "a bb ccc", "dddd bad f")
    assert data_format(source) == "parts"
    good = [("a", 1), ("bb", 2), ("ccc", 3), ("dddd", 4), ("f", 1)]
    with pytest.raises(DataError, match=r"1\.part, row 2: is bad$"):
        list(read_records(source, COLUMNS))
    with skipping(1):
        assert list(read_records(source, COLUMNS)) == good
    rows = IndexedRows(source, COLUMNS)
    assert len(rows) == 6
    assert rows[[5, 0, 3]] == [good[4], good[0], good[3]]
    assert source_digest(source).endswith("parts")
    with pytest.raises(DataError, match=f"a part of a folder of parts; name the folder, {source}"):
        list(read_records(source / "0.part", COLUMNS))


def test_a_format_of_folders_that_does_not_import_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    their_folders(tmp_path, "their_broken_parts", "import nothing_of_this_name")
    (tmp_path / "rows/red").mkdir(parents=True)
    (tmp_path / "rows/red/1.txt").write_text("sun")
    for _ in range(2):
        assert list(read_records(tmp_path / "rows", COLUMNS)) == [("sun", "red")]
    (line,) = caplog.messages
    assert "'folder.parts' is installed (their-folders 1.0)" in line
    assert line.endswith("; folders of its format are not read")


@pytest.fixture
def forget_formats() -> Iterator[None]:
    """Look for the formats that are here anew, as another process does."""
    installed._own_format.cache_clear()
    yield
    installed._own_format.cache_clear()


@pytest.mark.usefixtures("forget_formats")
def test_a_second_format_of_one_extension_is_refused_with_both_names(tmp_path: Path) -> None:
    install(tmp_path / "site", "their-csv", "[distcore.readers]\ncsv = their_pairs\n")
    (tmp_path / "rows.csv").write_text("text,label\na,1\n")
    with pytest.raises(
        StrategyError, match=r"'csv' is provided twice: by distcore-data .* their-csv"
    ):
        list(read_records(tmp_path / "rows.csv", COLUMNS))


@pytest.mark.usefixtures("forget_formats")
def test_the_formats_that_are_here_are_read_whatever_plugins_a_run_may_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCORE_LOAD_PLUGINS", "their-task")
    (tmp_path / "rows.csv").write_text("text,label\na,1\n")
    assert list(read_records(tmp_path / "rows.csv", COLUMNS)) == [("a", "1")]
    with pytest.raises(DataError, match=r"unknown extension '.pairs' \(known: .*, .txt, .tsv"):
        list(read_records(written(tmp_path), COLUMNS))


@pytest.mark.parametrize(
    ("index", "kind"),
    [({"shards": []}, "shards of MDS"), ({"chunks": [], "config": {}}, "chunks of litdata")],
)
def test_a_folder_of_shards_without_its_reader_names_the_extra(
    index: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "distcore-shards")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "shard.00000.mds").write_bytes(b"rows")
    line = (
        rf"rows: its index.json lists {kind}, whose reader is not installed: the extra 'shards' of"
    )
    for source in (folder, f"{folder},{folder}", tmp_path / "r*", folder / "shard.00000.mds"):
        with pytest.raises(DataError, match=line):
            list(read_records(Path(source), COLUMNS))
        with pytest.raises(DataError, match=line):
            source_digest(Path(source))


def test_other_data_may_lie_beside_a_file_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/index.json").write_text('[{"text": "a", "label": 1}]')
    assert list(read_records(tmp_path / "rows", COLUMNS)) == [("a", 1)]
