"""Columns of another task are told its name, and files of another kind theirs."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcore import DataError, RunConfig
from distcore_tasks.text_classification.task import TextClassification


def problem(file: Path) -> str:
    with pytest.raises(DataError) as error:
        TextClassification(data=str(file)).prepare(RunConfig())
    return str(error.value)


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        ("prompt completion", "causal-lm"),
        ("messages", "causal-lm"),
        ("prompt chosen rejected", "preference"),
        ("source target id", "seq2seq"),
        ("tokens tags", "token-classification"),
        ("anchor positive", "embedding"),
        ("prompt answer", ""),
    ],
)
def test_columns_of_another_task_are_told_its_name(columns: str, task: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict.fromkeys(columns.split(), "x")))
    said = problem(tmp_path / "rows.jsonl")
    assert said.startswith(f"data file {tmp_path}/rows.jsonl, row 1: no column 'text'")
    assert said.endswith(f", or train with --task {task}" if task else "columns.text=NAME")


def test_a_file_of_another_kind_is_named_with_the_suffix_that_it_needs(tmp_path: Path) -> None:
    text = b'{"text": "x", "label": 1}\n' * 50
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(text))
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.jsonl")
    with zipfile.ZipFile(tmp_path / "c.csv", "w") as archive:
        archive.writestr("rows.csv", text)
    for name, remedy in (
        ("a.jsonl", "gzip does; rename it to a.jsonl.gz"),
        ("b.jsonl", "Parquet does; rename it to b.parquet"),
        ("c.csv", "zip does; unzip it, and name what was in it"),
    ):
        said = (
            f"data file {tmp_path}/{name}: not text, but a file of another kind: it begins as"
            f" {remedy}"
        )
        assert problem(tmp_path / name) == said
