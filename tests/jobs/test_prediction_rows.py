"""Rows to predict come some at a time, numbered, and with the names that a column gives them."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import write
from work_folder import install

from distcore import registry
from distcore.errors import DataError, StrategyError
from distcore.jobs.prediction_rows import content, windows
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Dataset, Datasets, FileRows


class ReadsTexts:
    """Rows with a text and a label."""

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        raise NotImplementedError

    def row_columns(self) -> dict[str, str]:
        return {"columns.text": "text", "columns.label": "label"}


class OpensFolder(ReadsTexts):
    """Rows that are the names of files, whatever the columns are."""

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        for path in sorted(source.iterdir()):
            yield path.name, *others.values()


def bound(task: Any) -> BoundTask:
    """The face of a task that has only what reads rows."""
    return BoundTask.wrap(task)


@pytest.mark.needs("distcore-data")
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_windows_are_the_rows_of_the_file_in_order_with_their_numbers(
    tmp_path: Path, suffix: str
) -> None:
    path = write(
        tmp_path / f"a{suffix}", text=[f"text {n}" for n in range(10)], label=list("abcdefghij")
    )
    pieces = list(windows(bound(ReadsTexts()), path, None, 4, skip=3))
    assert [(window.file, window.start, len(window.records)) for window in pieces] == [
        (str(path), 4, 4),
        (str(path), 8, 3),
    ]
    assert [text for window in pieces for text, _ in window.records] == [
        f"text {n}" for n in range(3, 10)
    ]


@pytest.mark.programs
@pytest.mark.needs("distcore-data")
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_large_file_has_one_window_in_memory(tmp_path: Path, suffix: str) -> None:
    path, text, size = tmp_path / f"a{suffix}", "word " * 50, 20_000 * 250
    rows = write(path, text=[f"{text}{n}" for n in range(20_000)], label=[0] * 20_000)
    if suffix == ".parquet":
        pq.write_table(pq.read_table(path), path, row_group_size=1000)
    before, allocated = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    try:
        for window in windows(bound(ReadsTexts()), rows, None, 50):
            allocated = max(allocated, pa.total_allocated_bytes() - before)
            assert len(window.records) == 50
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak + allocated < size / 3


@pytest.mark.needs("distcore-data")
def test_a_column_names_the_rows_and_is_no_part_of_a_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", text=["x", "y"], label=["a", "b"], key=["r1", 2])
    [window] = windows(bound(ReadsTexts()), path, "key", 4)
    assert (window.records, window.ids) == ([("x", "a"), ("y", "b")], ["r1", 2])
    path = write(tmp_path / "b.jsonl", text=["x", "y"], label=["a", "b"], key=["r1", True])
    with pytest.raises(
        DataError, match=r"b.jsonl, row 2: id is True, expected an integer or a string"
    ):
        list(windows(bound(ReadsTexts()), path, "key", 4))


def test_a_task_may_open_what_is_no_file_itself(tmp_path: Path) -> None:
    for name in "cab":
        (tmp_path / name).touch()
    task = bound(OpensFolder())
    assert [window.records for window in windows(task, tmp_path, None, 2)] == [
        [("a",), ("b",)],
        [("c",)],
    ]
    assert [window.ids for window in windows(task, tmp_path, "key", 3, skip=1)] == [["key", "key"]]


def test_a_folder_or_file_is_known_again_until_it_changes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    image = tmp_path / "in/a.npz"
    image.write_bytes(b"1")
    of_folder, of_file = content(tmp_path), content(image)
    assert (content(tmp_path), content(image)) == (of_folder, of_file)
    image.write_bytes(b"2")
    os.utime(image, (0, 0))
    assert content(tmp_path) != of_folder
    assert content(image) != of_file


@pytest.mark.needs("distcore-data")
def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing: no such file"):
        content(tmp_path / "missing")


@pytest.mark.needs("distcore")
def test_without_a_reader_a_file_gets_one_line_and_a_task_opens_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "all_offers", lambda group: [])
    path = write(tmp_path / "a.jsonl", text=["x"], label=["a"])
    how = (
        r"no reader of rows named 'files' \(installed: none\)\. Install it with: pip install .*data"
    )
    for read in (
        lambda: list(windows(bound(ReadsTexts()), path, None, 4)),
        lambda: content(tmp_path / "*.jsonl"),
    ):
        with pytest.raises(StrategyError, match=how):
            read()
    assert [window.records for window in windows(bound(OpensFolder()), tmp_path, None, 2)] == [
        [("a.jsonl",)]
    ]
    assert content(tmp_path)


def test_a_reader_named_like_the_suffix_reads_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "their-reader", "[distcore.readers]\nnumbers = their_reader\n")
    (tmp_path / "their_reader.py").write_text(
        "def read(source, columns):\n    yield from ((line, *columns) for line in"
        " source.read_text().split())\ndef digest(source):\n    return 'theirs'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "a.numbers"
    source.write_text("7 8")
    (window,) = windows(bound(ReadsTexts()), source, None, 4)
    assert window.records == [
        ("7", "columns.text", "columns.label"),
        ("8", "columns.text", "columns.label"),
    ]
