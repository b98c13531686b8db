import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcore.config import Columns
from distcore.errors import DataError
from distcore.tasks.text_classification.data.files import Rows, read_rows

TEXTS = ['good, "very" good', "bad\u2028bad", "银色 的 高跟 鞋", "two\nlines"]
COLUMNS = Columns()


def write(path: Path, texts: list[str], labels: list[object], columns: Columns = COLUMNS) -> Path:
    named = [{columns.text: text, columns.label: label} for text, label in zip(texts, labels, strict=True)]
    if path.suffix == ".json":
        path.write_text(json.dumps(list(zip(texts, labels, strict=True))), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in named), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [columns.text, columns.label])
            writer.writeheader()
            writer.writerows(named)
    else:
        pq.write_table(pa.Table.from_pylist(named), path)
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("labels", [[0, 1, 2, 10], ["b", "a", "b", "喜"]], ids=["integers", "strings"])
def test_every_format_gives_the_same_rows(tmp_path, suffix, labels):
    rows = read_rows(write(tmp_path / f"data{suffix}", TEXTS, labels), COLUMNS)
    assert (rows.texts, rows.labels) == (TEXTS, labels)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_columns_can_be_renamed(tmp_path, suffix):
    columns = Columns(text="review", label="stars")
    assert read_rows(write(tmp_path / f"data{suffix}", ["a", "b"], [1, 5], columns), columns).labels == [1, 5]


def test_json_takes_objects_and_jsonl_takes_arrays(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "x", "label": 0, "id": 7}]')
    (tmp_path / "a.jsonl").write_text('["x", 0]\n\n["y", 1]\n')
    assert read_rows(tmp_path / "a.json", COLUMNS).texts == ["x"]
    assert read_rows(tmp_path / "a.jsonl", COLUMNS).labels == [0, 1]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", ["x", "y"], [0, 1])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_rows(path, COLUMNS).texts == ["x", "y"]


def test_csv_labels_with_leading_zeros_stay_strings(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,label\nx,01\ny,1\n")
    assert read_rows(path, COLUMNS).labels == ["01", "1"]


BAD = {
    "empty file": ("a.json", "", "is empty"),
    "no rows": ("a.json", "[]", "holds no rows"),
    "blank lines only": ("a.jsonl", "\n\n", "holds no rows"),
    "header only": ("a.csv", "text,label\n", "holds no rows"),
    "unknown extension": ("a.txt", "x", r"unknown extension '.txt' \(known: .json, .jsonl, .csv, .parquet\)"),
    "bad json": ("a.json", '[["x", 1],\n["y" 2]]', "line 2, column 6: not valid JSON"),
    "bad jsonl": ("a.jsonl", '["x", 1]\n["y", 2\n', "line 2, column"),
    "deep json": ("a.json", "[" * 200_000, "not usable JSON"),
    "top-level object": ("a.json", '{"a": 1}', "expected a list of .* found an object with 1 keys"),
    "three values": ("a.json", '[["x", 1], ["y", 1, 2]]', r"row 2: expected \[text, label\] .* a list of 3 values"),
    "bare string": ("a.jsonl", '"x"', "row 1: expected .* found a string \\('x'\\)"),
    "text number": ("a.json", "[[1, 1]]", r"row 1: text is an integer \(1\), expected a string"),
    "text null": ("a.jsonl", '{"text": null, "label": 1}', r"row 1: text is missing \(null\)"),
    "text blank": ("a.json", '[["x", 1], [" ", 1]]', "row 2: text is empty"),
    "text surrogate": (
        "a.json",
        '[["x\\ud800", 1]]',
        "row 1: text is not valid Unicode: lone surrogate at character 2",
    ),
    "label float": ("a.json", '[["x", 1.5]]', r"row 1: label is a float \(1.5\), expected an integer or a string"),
    "label boolean": ("a.json", '[["x", true]]', "row 1: label is a boolean"),
    "label list": ("a.json", '[["x", [1]]]', "row 1: label is a list of 1 values"),
    "label empty": ("a.csv", "text,label\nx,a\ny,\n", "row 2: label is empty"),
    "label negative": ("a.csv", "text,label\nx,1\ny,-1\n", "row 2: label -1 is out of range"),
    "labels mixed": ("a.json", '[["x", 1], ["y", "b"]]', r"row 2: label is a string \('b'\), but row 1 has an integer"),
    "missing key": ("a.jsonl", '{"text": "x", "lable": 1}', r"row 1: no column 'label' \(did you mean 'lable'\?\)"),
    "missing column": (
        "a.csv",
        "texts,label\nx,1\n",
        r"no column 'text' \(did you mean 'texts'\?\) .*columns.text=NAME",
    ),
    "short csv row": ("a.csv", "text,label\nx,1\ny\n", "row 2: expected 2 values as in the header, found 1"),
    "open quote": ("a.csv", 'text,label\n"x,1\n', "not valid CSV"),
    "not parquet": ("a.parquet", "not parquet at all", "not a readable Parquet file"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD.keys())
def test_bad_content_is_one_line_that_names_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"^data file {re.escape(str(tmp_path / name))}.*{message}") as caught:
        read_rows(tmp_path / name, COLUMNS)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        read_rows(tmp_path / "none.json", COLUMNS)
    with pytest.raises(DataError, match="is a folder, expected a file"):
        read_rows(tmp_path, COLUMNS)


def test_text_in_another_encoding_is_refused_with_its_place(tmp_path):
    (tmp_path / "a.csv").write_bytes("text,label\ncafé,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8 text \\(byte 0xe9 at offset 14\\)"):
        read_rows(tmp_path / "a.csv", COLUMNS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(tmp_path):
    path = write(tmp_path / "a.json", ["x"], [1])
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        read_rows(path, COLUMNS)


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    path = write(tmp_path / "a.parquet", ["x"], [1], Columns(text="body"))
    with pytest.raises(DataError, match=r"no column 'text' \(found: body, label\)"):
        read_rows(path, COLUMNS)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_reading_parquet_starts_no_threads(tmp_path):
    path = write(tmp_path / "a.parquet", TEXTS, [0, 1, 0, 1])
    code = (
        "import os, sys, pyarrow.parquet; from pathlib import Path; from distcore.config import Columns;"
        "from distcore.tasks.text_classification.data.files import read_rows;"
        "before = len(os.listdir('/proc/self/task'));"
        "read_rows(Path(sys.argv[1]), Columns()); print(len(os.listdir('/proc/self/task')) - before)"
    )
    assert subprocess.check_output([sys.executable, "-c", code, path], text=True).strip() == "0"


def test_rows_have_a_length():
    assert len(Rows("x", ["a", "b"], [0, 1])) == 2
