"""Remote folders of MDS and litdata: the rows of local ones, fetched shard by shard
through the bounded cache.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import foreign_shards
import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import (
    IndexedRows,
    check_source,
    data_format,
    fetching,
    read_records,
    remote,
    room,
    skipping,
    source_digest,
)
from distcore_data.indexes import entries

fsspec = pytest.importorskip("fsspec")
COLUMNS = {"columns.text": "text", "columns.label": "label"}
ROWS = shards.texts(30)
RECORDS = [(row["text"], row["label"]) for row in ROWS]
SOURCE = Path("memory://bucket/set")
FORMS = ("mds", "mds zstd", "litdata values", "litdata arrow")
REAL = ("mds", "mds zstd", "litdata", "litdata zstd", "litdata jpeg batch")


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket in memory, and a cache of the test's own, in which files are old at once."""
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "FIRST_WAIT", 0)
    monkeypatch.setattr(entries, "SETTLED", 0)
    system = fsspec.filesystem("memory")
    remote.copies_of.cache_clear()
    yield system
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


@pytest.fixture(scope="module")
def shards_of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_shards.write(tmp_path_factory.mktemp("others"), ROWS, *REAL)


def uploaded(system: Any, folder: Path, at: str = "/bucket/set") -> Path:
    for file in folder.rglob("*"):
        if file.is_file():
            system.pipe(f"{at}/{file.relative_to(folder)}", file.read_bytes())
    return folder


def local(tmp_path: Path, form: str) -> Path:
    return shards.written(tmp_path / "local", form, ROWS)


def records(source: Path = SOURCE) -> list[tuple[object, ...]]:
    return list(read_records(source, COLUMNS))


def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are fetched."""
    names, write = list[str](), fetching._write

    def counting(file: fetching.RemoteFile, draft: Path) -> None:
        names.append(file.name.rpartition("/")[2])
        write(file, draft)

    monkeypatch.setattr(fetching, "_write", counting)
    return names


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["memory://bucket/set", "memory://bucket/set/index.json"])
def test_a_url_has_the_rows_of_the_folder(
    bucket: Any, form: str, source: str, tmp_path: Path
) -> None:
    folder = uploaded(bucket, local(tmp_path, form))
    bucket.pipe("/bucket/set/notes.md", b"of no shard")
    check_source(Path(source))
    assert data_format(Path(source)) == data_format(folder)
    assert records(Path(source)) == records(folder) == RECORDS
    assert IndexedRows(Path(source), COLUMNS)[[29, 0, 14]] == [RECORDS[29], RECORDS[0], RECORDS[14]]
    assert source_digest(Path(source)) == source_digest(folder)


@pytest.mark.programs
@pytest.mark.parametrize("form", REAL)
def test_remote_shards_that_the_real_packages_wrote_are_read(
    bucket: Any, form: str, shards_of_others: Path
) -> None:
    uploaded(bucket, foreign_shards.written(shards_of_others, form))
    assert records() == RECORDS
    assert IndexedRows(SOURCE, COLUMNS)[[7]] == [RECORDS[7]]


def merged(folder: Path) -> Path:
    """Move the shards as the package does that merges several folders."""
    index = (folder / "index.json").read_text()
    (folder / "index.json").write_text(
        index.replace('"basename": "shard', '"basename": "first/shard')
    )
    for file in sorted(folder.glob("shard*")):
        (folder / "first").mkdir(exist_ok=True)
        file.rename(folder / "first" / file.name)
    return folder


@pytest.mark.parametrize("form", [local, lambda *some: merged(local(*some))], ids=["one", "merged"])
def test_a_cache_smaller_than_the_shards_holds_those_that_are_read(
    bucket: Any, form: Callable[[Path, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = uploaded(bucket, form(tmp_path, "mds"))
    size = max(file.stat().st_size for file in folder.rglob("shard*"))
    monkeypatch.setenv(room.LIMIT, str(4 * size + 1))
    names = fetched(monkeypatch)
    for _ in range(2):
        most, seen = 0, list[tuple[object, ...]]()
        for record in read_records(SOURCE, COLUMNS):
            held = [file for file in (tmp_path / "cache/remote").rglob("shard*") if file.is_file()]
            most, seen = max(most, len(held)), [*seen, record]
        assert seen == RECORDS
        assert 2 <= most <= 4
    assert {*names} == {file.name for file in folder.rglob("shard*")}
    assert len(names) < 20, "the first shards are kept for the next reader"


def test_rows_by_number_fetch_their_shards_alone(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded(bucket, local(tmp_path, "mds"))
    source_digest(SOURCE)
    for file in (tmp_path / "cache/remote").rglob("shard*"):
        file.unlink()
    names, rows = fetched(monkeypatch), IndexedRows(SOURCE, COLUMNS)
    assert rows[[0, 28, 29]] == [RECORDS[0], RECORDS[28], RECORDS[29]]
    assert sorted(names) == ["shard.00000.mds", "shard.00009.mds"]


def test_a_changed_shard_is_other_rows(bucket: Any, tmp_path: Path) -> None:
    folder = uploaded(bucket, local(tmp_path, "mds"))
    digest, before = source_digest(SOURCE), records()
    shard = (folder / "shard.00003.mds").read_bytes()
    bucket.pipe("/bucket/set/shard.00003.mds", shard.replace(b"row 10", b"row 99"))
    assert source_digest(SOURCE) == digest, "a process sees one version"
    remote.copies_of.cache_clear()
    assert source_digest(SOURCE) != digest
    assert [(a, b) for (a, _), (b, _) in zip(before, records(), strict=True) if a != b] == [
        ("row 10 ist grün", "row 99 ist grün")
    ]


@pytest.mark.parametrize(
    "read", [lambda: records(), lambda: IndexedRows(SOURCE, COLUMNS)[[11]]], ids=["all", "one"]
)
def test_a_damaged_shard_is_named_by_its_url(
    bucket: Any, read: Callable[[], object], tmp_path: Path
) -> None:
    folder = uploaded(bucket, local(tmp_path, "mds"))
    bucket.pipe("/bucket/set/shard.00003.mds", (folder / "shard.00003.mds").read_bytes()[:-5])
    line = (
        r"^data file memory://bucket/set/shard.00003.mds, row 3: the shard ends within this row: 5"
        r" bytes are missing"
    )
    with pytest.raises(DataError, match=line):
        read()
    uploaded(bucket, folder)
    remote.copies_of.cache_clear()
    with pytest.raises(
        DataError, match=r"^data file memory://bucket/set/shard.00000.mds: no column 'txt'"
    ):
        list(read_records(SOURCE, {"columns.text": "txt"}))
    bucket.pipe("/bucket/bad.jsonl", b'{"text": "a", "label": 0}\n{')
    with skipping(1) as bad:
        assert records(Path("memory://bucket/bad.jsonl")) == [("a", 0)]
    assert next(iter(bad.problems)).startswith("data file memory://bucket/bad.jsonl, line 2")


def test_mistakes_are_one_line(bucket: Any, tmp_path: Path) -> None:
    folder = uploaded(bucket, local(tmp_path, "mds"))
    bucket.rm("/bucket/set/shard.00003.mds")
    line = r"^data file memory://bucket/set/shard.00003.mds: no such file, but index.json names it$"
    with pytest.raises(DataError, match=line):
        records()
    index = (folder / "index.json").read_text()
    bucket.pipe(
        "/bucket/set/index.json", index.replace('"format": "mds"', '"format": "csv"').encode()
    )
    with pytest.raises(
        DataError, match=r"^data folder memory://bucket/set: has shards of the format csv 2"
    ):
        records()
    bucket.pipe("/bucket/set/index.json", b"{}")
    with pytest.raises(
        DataError, match=r"index.json: expected a list of \[text, label\] rows, found an object"
    ):
        records()


@pytest.mark.programs
def test_a_folder_of_a_web_server(bucket: Any, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    folder = local(tmp_path, "litdata values")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = Path(f"http://127.0.0.1:{server.server_port}/{folder.name}")
        assert records(url) == RECORDS
        digest = source_digest(url)
        os.utime(sorted(folder.glob("*.bin"))[1], (1000, 1000))
        remote.copies_of.cache_clear()
        assert source_digest(url) == digest, "the date changed, the content did not"
        sorted(folder.glob("*.bin"))[1].unlink()
        remote.copies_of.cache_clear()
        with pytest.raises(
            DataError, match=r"chunk-0-1.bin: no such file, but index.json names it$"
        ):
            records(url)
        server.shutdown()


def test_a_remote_folder_of_shards_without_its_reader_names_the_extra(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded(bucket, local(tmp_path, "mds"))
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "distcore-shards")
    lists = "its index.json lists shards of MDS"
    line = rf"^data folder memory://bucket/set: {lists}, .* the extra 'shards' of"
    with pytest.raises(DataError, match=line):
        records()
