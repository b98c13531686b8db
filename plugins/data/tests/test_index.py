"""The index: rows by number are those of a read from the start, and a file is read
for its index once.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import pickle
import random
import re
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_cases as shards

from distcore import DataError
from distcore.cli.main import main
from distcore_data import IndexedRows, read_records, source_digest
from distcore_data.formats import json_rows, tar_members
from distcore_data.indexes import entries, workers
from distcore_data.indexes.entries import FileIndex
from distcore_data.indexes.scans import scanned

COLUMNS = {"columns.text": "text", "columns.label": "label"}
ROWS: list[dict[str, Any]] = [
    {"text": f"{'grün ' * (row % 9)}\n{row}", "label": row % 3} for row in range(300)
]


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, in which files are old at once."""
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "SETTLED", 0)


def lines() -> bytes:
    """JSON lines with blank lines between some, and a mark of their encoding."""
    texts = [json.dumps(row, ensure_ascii=False) + "\n" * (1 + row["label"]) for row in ROWS]
    return b"\xef\xbb\xbf" + "".join([*texts[:100], " \u3000\n", *texts[100:]]).encode().rstrip()


def written(folder: Path, form: str) -> Path:
    if form in shards.FORMS:
        return shards.written(folder / "rows", form, ROWS)
    file = folder / f"rows.{form.removesuffix(' file')}"
    if form == "csv":
        with file.open("w", encoding="utf-8-sig", newline="") as opened:
            csv.writer(opened).writerows(
                [["text", "label"], *([row["text"], row["label"]] for row in ROWS), []]
            )
    elif form in ("jsonl", "json"):
        file.write_bytes(lines())
    elif form == "jsonl.gz":
        file.write_bytes(gzip.compress(lines()))
    elif form == "jsonl.zst":
        file.write_bytes(pa.compress(lines(), codec="zstd", asbytes=True))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=70)
    elif form.startswith("tar"):
        shards.tar(file, shards.members(ROWS))
    else:
        (folder / "list.json").write_text(json.dumps(ROWS))
        return folder / "list.json"
    return file


FILES = ("csv", "jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet", "tar file", "tar.gz", "list")


@pytest.mark.parametrize("form", [*FILES, *shards.FORMS])
def test_rows_by_number_are_those_of_a_read_from_the_start(tmp_path: Path, form: str) -> None:
    source = written(tmp_path, form)
    records, indexed = list(read_records(source, COLUMNS)), IndexedRows(source, COLUMNS)
    assert len(indexed) == len(records) == len(ROWS)
    some = random.Random(0).choices(range(len(ROWS)), k=40)
    assert indexed[some] == [records[row] for row in some]
    for row in (0, 1, 63, 64, 65, 128, len(ROWS) - 1):
        assert indexed[[row]] == [records[row]]
    assert indexed[[]] == []
    with pytest.raises(
        IndexError, match=r"rows.*has the rows 0 to 299$|list.json: has the rows 0 to 299$"
    ):
        indexed[[300]]


def counting(function: Any, calls: list[str]) -> Any:
    def counted(*given: Any) -> Any:
        calls.append(function.__name__)
        return function(*given)

    return counted


@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz", "tar file", "tar.gz"])
def test_rows_that_are_not_asked_for_are_not_decoded(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = IndexedRows(written(tmp_path, form), COLUMNS)
    rows[[0]]  # copies those of a compressed file
    decoded = list[str]()
    for owner, name in ((json_rows, "_parse"), (tar_members.Member, "read")):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name), decoded))
    assert [text for text, _ in rows[[70, 95, 290]]] == [ROWS[row]["text"] for row in (70, 95, 290)]
    two_members_each = 6
    expected = {"tar file": two_members_each, "jsonl.gz": 0, "tar.gz": 0}
    assert len(decoded) == expected.get(form, 3)


@pytest.mark.parametrize("block", [1, 7, 100])
def test_lines_may_be_longer_than_what_is_read_in_one_go(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcore_data.formats.scans.BLOCK", block)
    source = written(tmp_path, "jsonl")
    assert IndexedRows(source, COLUMNS)[range(300)] == list(read_records(source, COLUMNS))


def test_a_pickled_index_is_opened_by_its_new_process(tmp_path: Path) -> None:
    source = written(tmp_path, "jsonl")
    sent = pickle.dumps(IndexedRows(source, COLUMNS))
    assert len(sent) < 1000
    assert pickle.loads(sent)[[299, 0]] == IndexedRows(source, COLUMNS)[[299, 0]]


def test_texts_and_folders_of_texts(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("".join(f"zeile {row}\n\n" for row in range(200)))
    assert IndexedRows(tmp_path / "all.txt", {"columns.text": "text"})[[199, 70]] == [
        ("zeile 199",),
        ("zeile 70",),
    ]
    for name in ("good/1", "good/2", "poor/1"):
        (tmp_path / f"kinds/{name}.txt").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"kinds/{name}.txt").write_text(name)
    rows = IndexedRows(tmp_path / "kinds", COLUMNS)
    assert rows[[2, 1]] == [("poor/1", "poor"), ("good/2", "good")]


def test_a_delimiter_that_the_columns_tell_is_another_than_the_index_took(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "text;label,a,b\n" + "".join(f"x{row};{row},1,2\n" for row in range(90))
    )
    assert IndexedRows(tmp_path / "rows.csv", {"columns.text": "text"})[[80]] == [("x80",)]


def test_a_row_that_cannot_be_read_counts_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 70 + "{\n" + '{"text": "b"}\n')
    rows = IndexedRows(tmp_path / "rows.jsonl", {"columns.text": "text"})
    assert (len(rows), rows[[71]]) == (72, [("b",)])
    with pytest.raises(DataError, match=r"rows.jsonl, line 71, column 2: not valid JSON"):
        rows[[70]]


def counted(monkeypatch: pytest.MonkeyPatch, most: int = 99) -> list[str]:
    """The names of files that are scanned; the program is interrupted after ``most``."""
    seen = list[str]()

    def counting(file: Path) -> object:
        if len(seen) == most:
            raise KeyboardInterrupt
        seen.append(file.name)
        return scanned(file)

    monkeypatch.setattr(entries, "scanned", counting)
    return seen


@pytest.mark.parametrize("form", ["jsonl", "tar.gz", "parquet"])
def test_a_run_makes_the_same_index_and_takes_digests_from_it(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = written(tmp_path, form), counted(monkeypatch)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert source_digest(source).startswith(digest)
    assert source_digest(source).startswith(digest)
    assert len(IndexedRows(source, COLUMNS)) == 300
    assert seen == [source.name]
    source.write_bytes(source.read_bytes())
    assert source_digest(source).startswith(digest)
    source.unlink()
    assert not source_digest(written(tmp_path, "csv")).startswith(digest)
    assert seen == [source.name, source.name, "rows.csv"]


def test_a_file_that_may_still_change_unseen_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = written(tmp_path, "jsonl"), counted(monkeypatch)
    monkeypatch.setattr(entries, "SETTLED", 10**10)
    assert source_digest(source) == source_digest(source)
    assert len(seen) == 2


def test_a_damaged_index_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, seen = written(tmp_path, "jsonl"), counted(monkeypatch)
    records = IndexedRows(source, COLUMNS)[range(300)]
    [entry] = entries.index_folder().iterdir()
    for damage in (entry.read_bytes()[:-1] + b"\xff", entry.read_bytes()[:30], b"[]\n"):
        entry.write_bytes(damage)
        assert IndexedRows(source, COLUMNS)[range(300)] == records
    assert len(seen) == 4


def test_a_cut_file_has_its_digest_and_no_rows_by_number(tmp_path: Path) -> None:
    source = written(tmp_path, "tar file")
    source.write_bytes(source.read_bytes()[:-11000])
    assert source_digest(source) == hashlib.sha256(source.read_bytes()).hexdigest() + ".tar"
    with pytest.raises(
        DataError,
        match=r"rows.tar, row 300: a part of the tar file is missing: write or fetch it again$",
    ):
        IndexedRows(source, COLUMNS)


def many(folder: Path, files: int) -> Path:
    folder.mkdir()
    for number in range(files):
        (folder / f"{number:02}.jsonl").write_bytes(lines())
    return folder


def test_the_command_says_what_it_indexed_and_goes_on_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = many(tmp_path / "rows", 5)
    with monkeypatch.context() as interrupted:
        counted(interrupted, most=2)
        with pytest.raises(KeyboardInterrupt):
            source_digest(source)
    seen = counted(monkeypatch)
    assert main(["index", str(source)]) == 0
    assert seen == ["02.jsonl", "03.jsonl", "04.jsonl"]
    size = 5 * len(lines())
    assert (
        capsys.readouterr().out
        == f"data file {source}: 1,500 rows, {size:,} bytes in 5 files, of which 3 are indexed"
        " now\n"
        f"the index is in {tmp_path}/cache/index\n"
    )


@pytest.mark.programs
def test_processes_share_the_files_and_leave_bad_ones_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LEAST", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(entries, "SETTLED", -(10**12))
    source, seen = many(tmp_path / "rows", 5), counted(monkeypatch)
    _, made = workers.index_files(sorted(source.iterdir()))
    assert (made, seen) == (5, [])
    (source / "09.jsonl").write_bytes(b"\xff\n")
    (source / "08.jsonl").write_bytes(lines())
    with pytest.raises(DataError, match=r"09.jsonl: not UTF-8 text"):
        workers.index_files(sorted(source.iterdir()))
    assert seen == ["09.jsonl"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.csv", r"data file \S+none.csv: no such file"),
        ("empty.csv", r"data file \S+empty.csv: is empty"),
        ("blank.jsonl", r"data file \S+blank.jsonl: holds no rows"),
        ("cut.parquet", r"data file \S+cut.parquet: not a readable Parquet file: .+"),
        ("notes.md", r"data file \S+notes.md: unknown extension '.md' \(known: .+\)"),
    ],
)
def test_a_mistake_is_one_line(
    name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, content in {
        "empty.csv": "",
        "blank.jsonl": "\n",
        "cut.parquet": "PAR1",
        "notes.md": "x",
    }.items():
        (tmp_path / file).write_text(content)
    assert main(["index", str(tmp_path / name)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"error: {problem}", line), line


@pytest.mark.programs
def test_a_killed_program_leaves_whole_files_and_no_process(tmp_path: Path) -> None:
    source, index = many(tmp_path / "rows", 400), tmp_path / "cache/index"
    code = (
        "from distcore_data.indexes import workers; workers.LEAST = 0; from distcore.cli.main"
        " import main; main()"
    )
    command = [sys.executable, "-c", code, "index", str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        while not index.is_dir() or len(list(index.iterdir())) < 20:
            time.sleep(0.01)
        program.kill()
    time.sleep(1)
    left = len(list(index.iterdir()))
    time.sleep(1)
    assert left == len(list(index.iterdir())), "a process went on after the kill"
    assert 20 <= left < 400
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"120,000 rows, {400 * len(lines()):,} bytes in 400 files" in done


@pytest.mark.skipif(
    not Path("/proc/self/smaps").is_file(), reason="pages of a map are counted in /proc"
)
def test_places_of_very_many_rows_are_not_in_memory_twice(tmp_path: Path) -> None:
    file, count = tmp_path / "rows.jsonl", 2**19
    file.write_text("{}\n")
    places = np.arange(3 * count).reshape(count, 3)
    tracemalloc.start()
    entries._save(
        entries._entry(file),
        FileIndex("digest", 32 * count, 3, places),
        entries._state(file),
        time.time_ns(),
    )
    index = entries.known_index(file)
    assert tracemalloc.get_traced_memory()[1] < 0.4 * places.nbytes
    tracemalloc.stop()
    assert index is not None
    assert index.places[:, 0].searchsorted(3 * 12345, "right") == 12346
    _, _, told = Path("/proc/self/smaps").read_text().rpartition(str(entries._entry(file)))
    [pages] = re.findall(r"^Rss: +(\d+) kB$", told.partition("VmFlags")[0], re.MULTILINE)
    assert int(pages) * 1024 < places.nbytes / 2, "a search reads few pages, and opening none"
    assert (np.asarray(index.places) == places).all()
