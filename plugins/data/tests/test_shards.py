"""Shards of every form give the rows of the same JSON lines, one after the other,
however they are named.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import Filtered, check_source, data_format, read_records, source_digest
from distcore_data.reader import digest

COLUMNS = {"columns.text": "text", "columns.label": "label"}
ROWS = shards.texts(8)
RECORDS = [(row["text"], row["label"]) for row in ROWS]


@pytest.mark.parametrize("form", shards.FORMS)
def test_every_form_gives_the_same_records(tmp_path: Path, form: str) -> None:
    source = shards.written(tmp_path / "rows", form, ROWS)
    check_source(source)
    assert list(read_records(source, COLUMNS)) == RECORDS
    assert list(read_records(source, {"columns.text": "label"})) == [
        (label,) for _, label in RECORDS
    ]
    assert list(read_records(Filtered(source, "label", "1"), {"columns.text": "text"})) == [
        (text,) for text, label in RECORDS if label
    ]
    with pytest.raises(DataError, match=r"no column 'texts' \(did you mean 'text'\?\)"):
        list(read_records(source, {"columns.text": "texts"}))


@pytest.mark.parametrize("form", shards.FORMS)
def test_the_digest_is_of_the_content_wherever_it_is(tmp_path: Path, form: str) -> None:
    source = shards.written(tmp_path / "rows", form, ROWS)
    other = shards.written(tmp_path / "other", form, [*ROWS[:-1], {"text": "new", "label": 1}])
    copy = shutil.copytree(tmp_path / "rows", tmp_path / "copy") / (
        "rows.arrow" if source.is_file() else ""
    )
    assert source_digest(source) == source_digest(copy) != source_digest(other)
    assert source_digest(source).endswith(data_format(source))
    # a folder of files is known by their times
    assert digest(source) in (source_digest(source), None)


@pytest.mark.parametrize("form", ["tar", "mds", "litdata"])
def test_folders_patterns_commas_and_lists_name_shards(tmp_path: Path, form: str) -> None:
    for name, rows in (("a", ROWS[:5]), ("b", ROWS[5:])):
        (tmp_path / "sets").mkdir(exist_ok=True)
        shards.written(tmp_path / "sets" / name, form, rows)
    (tmp_path / "sets/all.list").write_text(f"a\n\n{tmp_path}/sets/b\n")
    for source in (
        f"{tmp_path}/sets/a, {tmp_path}/sets/b",
        f"{tmp_path}/sets/[ab]",
        f"{tmp_path}/sets/all.list",
    ):
        assert list(read_records(Path(source), COLUMNS)) == RECORDS
    backward = Path(f"{tmp_path}/sets/b,{tmp_path}/sets/a")
    assert list(read_records(backward, COLUMNS)) == RECORDS[5:] + RECORDS[:5]


def test_a_list_may_name_files_of_any_format_and_says_what_is_wrong_with_a_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": 1}\n')
    listed = tmp_path / "rows.list"
    listed.write_text("a.jsonl\n")
    assert list(read_records(listed, COLUMNS)) == [("x", 1)]
    problems = {
        "b.jsonl": f"line 2: no such file: {tmp_path}/b.jsonl",
        "*.csv": "line 2: no such file: ",
        "other.list": "line 2: names another list",
    }
    for line, problem in problems.items():
        listed.write_text(f"a.jsonl\n{line}\n")
        with pytest.raises(DataError, match=f"^data file {listed}, {problem}"):
            list(read_records(listed, COLUMNS))
    listed.write_text("\n")
    with pytest.raises(DataError, match="lists no files"):
        list(read_records(listed, COLUMNS))


def test_the_same_shard_twice_is_refused(tmp_path: Path) -> None:
    shards.written(tmp_path / "a", "tar", ROWS)
    one = tmp_path / "a/shard-00000.tar"
    with pytest.raises(DataError, match=r"shard-00000\.tar is named twice; name it once"):
        check_source(Path(f"{one},{tmp_path}/a/*.tar"))


def test_text_files_in_folders_are_rows_with_the_folder_as_label(tmp_path: Path) -> None:
    for name, text in (
        ("good/1.txt", "one\n\ntwo\n"),
        ("bad/2.txt", "three"),
        ("bad/10.txt", "four"),
        ("good/x.md", "-"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = list(read_records(tmp_path, {**COLUMNS, "columns.id": "file"}))
    assert rows == [
        ("four", "bad", "bad/10.txt"),
        ("three", "bad", "bad/2.txt"),
        ("one\n\ntwo\n", "good", "good/1.txt"),
    ]
    first = source_digest(tmp_path)
    (tmp_path / "good/1.txt").rename(tmp_path / "bad/1.txt")
    (tmp_path / "good/3.txt").write_text("five")
    assert source_digest(tmp_path) != first
    (tmp_path / "lines.txt").write_text("a\nb\n")  # as ever
    assert list(read_records(tmp_path, {"columns.text": "text"})) == [("a",), ("b",)]


def test_columns_of_a_tar_file_are_members_and_keys_of_json(tmp_path: Path) -> None:
    tree = json.dumps({"text": "in json", "label": "pos", "meta": {"lang": "de"}}).encode()
    path = shards.tar(
        tmp_path / "a.tar",
        [
            {"__key__": "x/1", "json": tree},
            {"__key__": "x/2", "json": tree, "txt": b"own", "seg.txt": b"s"},
        ],
    )
    assert list(read_records(path, COLUMNS)) == [("in json", "pos"), ("own", "pos")]
    assert list(read_records(path, {"columns.id": "__key__", "columns.text": "meta.lang"})) == [
        ("x/1", "de"),
        ("x/2", "de"),
    ]
    named = shards.tar(tmp_path / "b.tar", [{"caption.txt": b"c", "cls": b"word"}])
    assert list(read_records(named, {"columns.text": "caption.txt", "columns.label": "cls"})) == [
        ("c", "word")
    ]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_tar_files_of_every_kind_with_long_names(tmp_path: Path, form: int, suffix: str) -> None:
    rows = [
        {"__key__": f"{'long/' * 30}{number}", **row}
        for number, row in enumerate(shards.members(ROWS))
    ]
    assert list(read_records(shards.tar(tmp_path / f"a{suffix}", rows, form), COLUMNS)) == RECORDS


def test_classes_of_an_arrow_file_have_their_names(tmp_path: Path) -> None:
    stored = json.dumps(
        {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    )
    schema = pa.schema({"text": pa.string(), "label": pa.int64()}, metadata={"huggingface": stored})
    (tmp_path / "a.arrow").write_bytes(shards.arrow_bytes(ROWS[:2], indexed=False, schema=schema))
    assert [label for _, label in read_records(tmp_path / "a.arrow", COLUMNS)] == ["no", "yes"]


@pytest.mark.programs
@pytest.mark.parametrize("form", shards.FORMS)
def test_large_shards_have_one_row_or_some_in_memory(tmp_path: Path, form: str) -> None:
    rows = [{"text": f"{number} " + "word " * 2000, "label": 0} for number in range(1000)]
    source, size = tmp_path / "rows", 10_000 * 1000
    if form.startswith("mds"):
        shards.mds(source, rows, per_shard=1000, compression=form.partition(" ")[2] or None)
    else:
        source = shards.written(source, form, rows)
    del rows
    before, allocated, count = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    try:
        for _ in read_records(source, COLUMNS):
            allocated, count = max(allocated, pa.total_allocated_bytes() - before), count + 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 1000
    assert peak + allocated < size / 3


@pytest.mark.programs
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("form", ["litdata", "arrow file", "mds zstd"])
def test_reading_shards_starts_no_threads(tmp_path: Path, form: str) -> None:
    code = (
        "import os, sys, pyarrow; from pathlib import Path; from distcore_data.files import"
        " read_records;before ="
        " len(os.listdir('/proc/self/task'));list(read_records(Path(sys.argv[1]), {'columns.text':"
        " 'text'}));print(len(os.listdir('/proc/self/task')) - before)"
    )
    source = shards.written(tmp_path / "rows", form, ROWS)
    assert subprocess.check_output([sys.executable, "-c", code, source], text=True).strip() == "0"
