"""Files that cannot be sought are copied once, and their rows read by number from the copy: any
values, with little room, after a kill, and by several processes.
"""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import shard_cases as shards
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as any_of

from distcore import DataError
from distcore_data import IndexedRows, fetching, read_records, remote, room, skipping
from distcore_data.indexes import drafts, entries, record_file
from distcore_data.indexes.record_file import loaded, stored

COLUMNS = {"columns.text": "text", "columns.label": "label"}
TEXT = {"columns.text": "text"}
COUNT = 200
PIECE = 1500


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "SETTLED", 0)
    return tmp_path / "cache/remote"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are copied."""
    names = list[str]()
    make = record_file.write_records

    def counting(draft: Any, count: int, rows: Any) -> int:
        names.append(draft._source.name)
        return make(draft, count, rows)

    monkeypatch.setattr("distcore_data.indexes.copies.write_records", counting)
    return names


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def parts(content: bytes) -> list[bytes]:
    return [content[start : start + PIECE] for start in range(0, len(content), PIECE)]


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    "members.gz": lambda content: b"".join(map(gzip.compress, parts(content))),
    "padded.gz": lambda content: gzip.compress(content) + bytes(700),
    "frames.zst": lambda content: b"".join(map(zstd, parts(content))),
}
"""Ends of names to what compresses such a file."""
ROWS: list[dict[str, Any]] = [
    {"text": f"{'grün ' * (row % 9)}{row}", "label": row % 3} for row in range(COUNT)
]


def content(folder: Path, suffix: str) -> bytes:
    if suffix == "tar":
        members = [
            {"json": json.dumps(row).encode(), "jpg": f"\xff\0{row['text']}".encode("latin-1")}
            for row in ROWS
        ]
        return shards.tar(folder / "whole.tar", members).read_bytes()
    if suffix == "json":
        return json.dumps(ROWS).encode()
    if suffix == "csv":
        lines = ["text,label", *(f'"{row["text"]}\n",{row["label"]}' for row in ROWS)]
        return "".join(f"{line}\n\n" for line in lines).encode()
    if suffix == "txt":
        return "".join(f"\ufeff{row['text']} \r\n\n" for row in ROWS).encode()
    return "".join(json.dumps(row) + "\n\u3000\n" for row in ROWS).encode()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "txt", "tar"])
@pytest.mark.parametrize("packed", PACKED)
def test_rows_are_those_of_a_read_from_the_start_and_are_copied_once(
    suffix: str, packed: str, tmp_path: Path, made: list[str]
) -> None:
    source = tmp_path / f"rows.{suffix}.{packed.rpartition('.')[2]}"
    source.write_bytes(PACKED[packed](content(tmp_path, suffix)))
    columns = {"txt": TEXT, "tar": COLUMNS | {"columns.image": "image"}}.get(suffix, COLUMNS)
    expected, rows = list(read_records(source, columns)), IndexedRows(source, columns)
    assert len(rows) == len(expected) == COUNT
    some = np.random.default_rng(0).integers(0, COUNT, 60)
    assert rows[some] == [expected[row] for row in some]
    assert rows[range(COUNT)] == IndexedRows(source, columns)[range(COUNT)] == expected
    assert made == [source.name]


def test_a_list_is_copied_and_a_json_file_with_a_row_per_line_is_not(
    tmp_path: Path, made: list[str]
) -> None:
    for name in ("list", "lines"):
        kind = "json" if name == "list" else "jsonl"
        (tmp_path / f"{name}.json").write_bytes(content(tmp_path, kind))
        rows = IndexedRows(tmp_path / f"{name}.json", COLUMNS)
        assert rows[[150, 3]] == [(ROWS[row]["text"], ROWS[row]["label"]) for row in (150, 3)]
    assert made == ["list.json"]


def test_a_table_whose_columns_tell_another_delimiter_than_the_index_took_is_copied(
    tmp_path: Path, made: list[str]
) -> None:
    lines = ["text;label,a,b", *(f'"x;\n{row}";{row},1,2' for row in range(90))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    expected = list(read_records(tmp_path / "rows.csv", TEXT))
    assert IndexedRows(tmp_path / "rows.csv", TEXT)[[80, 0]] == [expected[80], expected[0]]
    assert expected[80] == ("x;\n80",)
    assert made == ["rows.csv"]


JSON = any_of.recursive(
    any_of.one_of(
        any_of.none(),
        any_of.booleans(),
        any_of.integers(),
        any_of.floats(),
        any_of.text(any_of.characters(exclude_categories=())),
        any_of.sampled_from(["NA", "007", "true", "1e5", "2024-01-31", "\ud800", "\u2028", 2**70]),
    ),
    lambda inner: any_of.one_of(
        any_of.lists(inner, max_size=3), any_of.dictionaries(any_of.text(), inner, max_size=3)
    ),
    max_leaves=8,
)
FIXTURES = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


ODD: list[Any] = [
    *(2**70, 2**53 + 1, None, True, 1.5, float("inf"), -0.0, "a\ud800b", "NA", "007", "2024-01-31"),
    *("\u2028", "", "1e5", [{}], {"a": [1, None, "\udfff"]}),
]
"""Values that other stores of rows change."""


@FIXTURES
@example(rows=[(value, ODD) for value in ODD])
@given(rows=any_of.lists(any_of.tuples(JSON, JSON), min_size=1, max_size=20))
def test_any_values_are_those_of_the_reader(rows: list[tuple[Any, Any]], tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl.gz"
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    source.write_bytes(gzip.compress("\n".join(lines).encode(), 1))
    expected = list(read_records(source, COLUMNS))
    for some in (range(len(rows)), [len(rows) - 1], [0]):
        assert repr(IndexedRows(source, COLUMNS)[some]) == repr([expected[row] for row in some])


@example(record=[*ODD, b"\xff\0", b""])
@given(record=any_of.lists(any_of.one_of(JSON, any_of.binary()), max_size=4))
@settings(deadline=None, max_examples=60)
def test_a_stored_record_has_the_same_values_and_types(record: list[Any]) -> None:
    assert repr(loaded(stored(tuple(record)))) == repr(tuple(record))


def test_what_json_does_not_have_is_not_stored() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (datetime.date(2024, 1, 31), {"a": b"bytes"}, deep):
        assert stored(("text", value)) == b""


def test_a_bad_row_has_its_file_and_number_and_others_are_read(
    tmp_path: Path, made: list[str]
) -> None:
    lines = content(tmp_path, "jsonl").decode().splitlines()
    lines[2 * 40] = '{"text": "no label"}'
    lines[2 * 70] = "{"
    source = tmp_path / "rows.jsonl.gz"
    source.write_bytes(gzip.compress("\n".join(lines).encode()))
    rows = IndexedRows(source, COLUMNS)
    for row, problem in {
        40: "row 41: no column 'label'",
        70: "line 141, column 2: not valid",
    }.items():
        with pytest.raises(DataError, match=re.escape(f"data file {source}, {problem}")):
            rows[[3, row]]
    assert rows[[39, 41]] == [(ROWS[row]["text"], ROWS[row]["label"]) for row in (39, 41)]
    assert made == [source.name]


@pytest.mark.parametrize("packed", [".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "not one"])
def test_damage_is_one_line_as_in_a_read_from_the_start(
    packed: str, damage: str, tmp_path: Path
) -> None:
    source = tmp_path / f"rows.jsonl{packed}"
    whole = PACKED[packed](content(tmp_path, "jsonl"))
    source.write_bytes(whole[:-30] if damage == "cut" else b"garbage" + whole)
    with pytest.raises(DataError, match=r", line \d+: cannot be read: [^\n]+$") as error:
        list(read_records(source, COLUMNS))
    with pytest.raises(DataError, match=f"^{re.escape(str(error.value))}$"):
        IndexedRows(source, COLUMNS)


def test_the_rows_before_a_cut_are_read_where_bad_ones_are_passed_over(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl.gz"
    source.write_bytes(gzip.compress(content(tmp_path, "jsonl"))[:-300])
    with skipping(1):
        expected = list(read_records(source, COLUMNS))
    rows = IndexedRows(source, COLUMNS, whole=False)
    assert 50 < len(rows) == len(expected) < COUNT
    assert rows[range(len(rows))] == expected


def shards_of(folder: Path, count: int = 10) -> list[Path]:
    """Write compressed files of different rows."""
    folder.mkdir()
    files = []
    for number in range(count):
        lines = [json.dumps({"text": f"{number} {row} " * 5}) for row in range(COUNT)]
        files.append(folder / f"{number}.jsonl.gz")
        files[-1].write_bytes(gzip.compress("\n".join(lines).encode()))
    return files


def on_disk(cache: Path) -> int:
    return sum(file.stat().st_size for file in cache.rglob("*.rows"))


def test_a_third_of_the_room_holds_the_shards_that_are_read(
    tmp_path: Path, cache: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = shards_of(tmp_path / "rows")
    expected = [record for file in files for record in read_records(file, TEXT)]
    rows = IndexedRows(tmp_path / "rows", TEXT)
    assert rows[range(len(rows))] == expected
    assert len(made) == 10
    limit = on_disk(cache) * 3 // 10
    monkeypatch.setenv(room.LIMIT, str(limit))
    made.clear()
    shutil.rmtree(cache)
    for first in range(0, len(rows), 2 * COUNT):  # a window of two shards
        window = np.random.default_rng(first).permutation(2 * COUNT) + first
        for some in np.array_split(window, 8):
            assert rows[some] == [expected[row] for row in some]
            assert on_disk(cache) <= limit
    assert sorted(made) == [file.name for file in files], "each is copied once in an epoch"
    assert all(file.is_file() for file in files), "of the source nothing is removed"


def test_the_copy_that_was_not_read_for_the_longest_time_makes_room(
    tmp_path: Path, cache: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards_of(tmp_path / "rows", 3)
    rows, first, second, third = IndexedRows(tmp_path / "rows", TEXT), 0, COUNT, 2 * COUNT
    rows[[first]]
    monkeypatch.setenv(room.LIMIT, str(on_disk(cache) * 5 // 2))
    rows[[second]]
    rows[[first]]
    rows[[third]]
    rows[[first]]
    assert made == ["0.jsonl.gz", "1.jsonl.gz", "2.jsonl.gz"]
    rows[[second]]
    assert made[3:] == ["1.jsonl.gz"]


def test_an_order_is_told_when_the_cache_does_not_hold_all_copies(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards_of(tmp_path / "rows", 4)
    rows = IndexedRows(tmp_path / "rows", TEXT)
    rows.check_room()
    assert rows.pieces(50).tolist() == [*range(0, 4 * COUNT + 1, 50)]
    unpacked = sum(
        len(gzip.decompress(file.read_bytes())) for file in (tmp_path / "rows").iterdir()
    )
    assert rows.cached_bytes == unpacked
    rows[[0, COUNT, 2 * COUNT, 3 * COUNT]]
    assert rows.cached_bytes == on_disk(cache)
    monkeypatch.setenv(room.LIMIT, str(on_disk(cache) - 1))
    assert rows.pieces(50).tolist() == [*range(0, 4 * COUNT + 1, COUNT)], "files as a whole"
    with pytest.raises(
        DataError, match=r"rows of all files, \d+ bytes, .*; set order.kind=windows"
    ):
        rows.check_room()
    assert IndexedRows(tmp_path / "rows", {}).have_room, "of which no row is read"


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json"])
def test_a_file_whose_copy_is_larger_than_the_cache_is_named(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(tmp_path, "json" if name.endswith("json") else "jsonl")
    (tmp_path / name).write_bytes(whole if name.endswith("json") else gzip.compress(whole))
    monkeypatch.setenv(room.LIMIT, "3000")
    monkeypatch.setattr(drafts, "BUFFER", 500)
    problem = (
        f"data file {tmp_path / name}: its rows are copied to be read by number, and the copy takes"
        f" more than the 3000 bytes of the cache {tmp_path}/cache; raise DISTCORE_REMOTE_BYTES, or"
        " write its rows to several files"
    )
    with pytest.raises(DataError, match=f"^{re.escape(problem)}$"):
        IndexedRows(tmp_path / name, COLUMNS)[[0]]
    assert not [*cache.rglob("*.rows"), *cache.rglob(".*.rows")]
    assert (cache / room.TAKEN).read_text() == "0"


def test_a_remote_file_is_fetched_to_be_copied_and_not_for_its_copy(
    cache: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    remote.copies_of.cache_clear()
    lines = "".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(COUNT))
    fsspec.filesystem("memory").pipe("/copied/rows.jsonl.gz", gzip.compress(lines.encode()))
    rows = IndexedRows(Path("memory://copied/rows.jsonl.gz"), TEXT)
    assert rows[[7]] == [("row 7",)]
    [fetched] = cache.rglob("*.gz")
    fetched.unlink()
    monkeypatch.setattr(fetching, "_fetch", lambda *_: pytest.fail("fetched again"))
    assert rows[[199]] == [("row 199",)]
    monkeypatch.undo()
    [copy] = cache.rglob("*.rows")
    monkeypatch.setenv("DISTCORE_CACHE", str(cache.parent))
    copy.unlink()
    assert rows[[3]] == [("row 3",)]
    assert made == ["rows.jsonl.gz"]


def test_a_line_says_once_that_a_large_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distcore")
    files = shards_of(tmp_path / "rows", 2)
    monkeypatch.setattr(drafts, "SAID", files[0].stat().st_size + 1)
    IndexedRows(files[0], TEXT)[[0]]
    assert not caplog.messages
    monkeypatch.setattr(drafts, "SAID", files[1].stat().st_size)
    for row in (0, 1):
        IndexedRows(files[1], TEXT)[[row]]
    assert caplog.messages == [f"data: copying {files[1]} to read its rows by number"]


def test_a_bad_row_of_a_remote_file_is_named_by_its_url(cache: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    remote.copies_of.cache_clear()
    lines = "".join(json.dumps({"text": row} if row != 9 else {}) + "\n" for row in range(20))
    fsspec.filesystem("memory").pipe("/copied/bad.jsonl.gz", gzip.compress(lines.encode()))
    rows = IndexedRows(Path("memory://copied/bad.jsonl.gz"), TEXT)
    assert rows[[8]] == [(8,)]
    [fetched] = cache.rglob("*.gz")
    fetched.unlink()
    with pytest.raises(
        DataError, match=r"^data file memory://copied/bad.jsonl.gz, row 10: no column"
    ):
        rows[[8, 9]]
    assert not room.HELD[fetched]


SLOW = """
import sys, time
from pathlib import Path
from distcore_data import IndexedRows
from distcore_data.indexes import copies

read_rows = copies.read_rows
def slowly(*given):
    print("begun", flush=True)
    for number, row in enumerate(read_rows(*given)):
        time.sleep(0.2 if number == 150 else 0)
        yield row
copies.read_rows = slowly
print(IndexedRows(Path(sys.argv[1]), {"columns.text": "text"})[[199]][0][0], flush=True)
"""


def started(source: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})


@pytest.mark.programs
def test_processes_copy_a_file_once_and_a_killed_one_leaves_no_half(
    tmp_path: Path, cache: Path
) -> None:
    [source] = shards_of(tmp_path / "rows", 1)
    killed = started(source)
    assert killed.stdout
    assert killed.stdout.readline() == "begun\n"
    time.sleep(0.05)
    killed.kill()
    killed.communicate()
    assert not list(cache.rglob("[!.]*.rows"))
    both = [started(source), started(source)]
    said = [process.communicate()[0].splitlines() for process in both]
    last = f"{'0 199 ' * 5}"
    assert sorted(said, key=len) == [[last], ["begun", last]]
    assert len(list(cache.rglob("*.rows"))) == 1
    [copy] = cache.rglob("*.rows")
    assert room._counted() == copy.stat().st_size


@pytest.mark.programs
def test_files_of_the_real_programs(tmp_path: Path) -> None:
    for program, suffix in {"pzstd": "zst", "bgzip": "gz", "xz": "xz", "bzip2": "bz2"}.items():
        if not shutil.which(program):
            continue
        source = tmp_path / "rows.jsonl"
        source.write_bytes(content(tmp_path, "jsonl"))
        subprocess.run([program, source], check=True)
        packed = source.with_name(f"rows.jsonl.{suffix}")
        expected = [(row["text"], row["label"]) for row in ROWS]
        assert IndexedRows(packed, COLUMNS)[range(COUNT)] == expected
        source.unlink(missing_ok=True)
