import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from data_cases import TEXTS, write

from distcore.data.files import read_records
from distcore.errors import DataError

COLUMNS = {"columns.text": "text", "columns.label": "label"}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_every_format_gives_the_same_records(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", question=TEXTS, context=TEXTS[::-1], answer=["a", "b", "c", "d"])
    columns = {"columns.question": "question", "columns.context": "context", "columns.answer": "answer"}
    assert list(read_records(path, columns)) == list(zip(TEXTS, TEXTS[::-1], "abcd", strict=True))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_only_the_columns_asked_for_are_returned_in_the_order_asked_for(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", id=["7"], label=["a"], text=["x"])
    assert list(read_records(path, COLUMNS)) == [("x", "a")]


def test_csv_values_are_strings(tmp_path):
    assert list(read_records(write(tmp_path / "data.csv", text=["x"], label=[1]), COLUMNS)) == [("x", "1")]


def test_json_takes_objects_and_jsonl_takes_arrays(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "x", "label": 0, "id": 7}]')
    (tmp_path / "a.jsonl").write_text('["x", 0]\n\n["y", 1]\n')
    assert list(read_records(tmp_path / "a.json", COLUMNS)) == [("x", 0)]
    assert list(read_records(tmp_path / "a.jsonl", COLUMNS)) == [("x", 0), ("y", 1)]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", text=["x", "y"], label=["a", "b"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(read_records(path, COLUMNS)) == [("x", "a"), ("y", "b")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("header", ["text{}label", '"text"{}"label"', "\r\ntext{}label"])
def test_a_csv_file_may_be_separated_by_semicolons_or_tabs(tmp_path, delimiter, header):
    rows = ['"good, better; best"{}a', '"b\tad"{}b']
    (tmp_path / "a.csv").write_text("\n".join(line.format(delimiter) for line in (header, *rows)))
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [("good, better; best", "a"), ("b\tad", "b")]


def test_a_delimiter_among_the_words_of_a_header_separates_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("a;b;c;d,text,label\n1,x,a\n")
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [("x", "a")]


def test_lines_of_a_csv_file_may_end_as_on_windows_and_values_may_hold_line_ends(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,label\r\n"one\r\ntwo",a\r\n"three ""3""\nfour",b\r\n')
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [("one\r\ntwo", "a"), ('three "3"\nfour', "b")]


BAD = {
    "empty file": ("a.json", "", "is empty"),
    "unknown extension": ("a.txt", "x", r"unknown extension '.txt' \(known: .json, .jsonl, .csv, .parquet\)"),
    "bad json": ("a.json", '[["x", 1],\n["y" 2]]', "line 2, column 6: not valid JSON"),
    "bad jsonl": ("a.jsonl", '["x", 1]\n["y", 2\n', "line 2, column"),
    "deep json": ("a.json", "[" * 200_000, "not usable JSON"),
    "top-level object": ("a.json", '{"a": 1}', "expected a list of .* found an object with 1 keys"),
    "three values": ("a.json", '[["x", 1], ["y", 1, 2]]', r"row 2: expected \[text, label\] .* a list of 3 values"),
    "bare string": ("a.jsonl", '"x"', "row 1: expected .* found a string \\('x'\\)"),
    "missing key": ("a.jsonl", '{"text": "x", "lable": 1}', r"row 1: no column 'label' \(did you mean 'lable'\?\)"),
    "missing column": (
        "a.csv",
        "texts,label\nx,1\n",
        r"no column 'text' \(did you mean 'texts'\?\) .*columns.text=NAME",
    ),
    "missing column, semicolons": ("a.csv", "review;stars\nx;1\n", r"no column 'text' \(found: review, stars\)"),
    "short csv row": ("a.csv", "text,label\nx,1\ny\n", "row 2: expected 2 values as in the header, found 1"),
    "open quote": ("a.csv", 'text,label\n"x,1\n', "not valid CSV"),
    "not parquet": ("a.parquet", "not parquet at all", "not a readable Parquet file"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD.keys())
def test_bad_content_is_one_line_that_names_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"^data file {re.escape(str(tmp_path / name))}.*{message}") as caught:
        list(read_records(tmp_path / name, COLUMNS))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        read_records(tmp_path / "none.json", COLUMNS)
    with pytest.raises(DataError, match="is a folder, expected a file"):
        read_records(tmp_path, COLUMNS)


ENCODINGS = {
    "western": ("text,label\ncafé – “good”,1\n".encode("cp1252"), "it looks like cp1252; convert it: iconv -f cp1252"),
    "utf-16": ("text,label\ncafé,1\n".encode("utf-16"), "it looks like utf-16; convert it: iconv -f utf-16"),
    "chinese": (
        "text,label\n银色的高跟鞋很好,1\n".encode("gb18030"),
        "with its encoding for ENCODING: iconv -f ENCODING",
    ),
}


@pytest.mark.parametrize(("content", "message"), ENCODINGS.values(), ids=ENCODINGS.keys())
def test_text_in_another_encoding_is_refused_with_what_it_looks_like(tmp_path, content, message):
    (tmp_path / "my rows.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"not UTF-8 text \(byte 0x\w\w at offset \d+\); ") as caught:
        list(read_records(tmp_path / "my rows.csv", COLUMNS))
    old, new = tmp_path / "my rows.csv", tmp_path / "my rows-utf8.csv"
    assert str(caught.value).endswith(f"{message} -t utf-8 '{old}' > '{new}'")


@pytest.mark.skipif(shutil.which("iconv") is None, reason="iconv is not installed")
@pytest.mark.parametrize("name", ["western", "utf-16"])
def test_the_command_that_the_message_names_converts_the_file(tmp_path, name):
    (tmp_path / "a.csv").write_bytes(ENCODINGS[name][0])
    with pytest.raises(DataError) as caught:
        list(read_records(tmp_path / "a.csv", COLUMNS))
    subprocess.run(["sh", "-c", str(caught.value).partition("convert it: ")[2]], check=True)
    ((text, label),) = read_records(tmp_path / "a-utf8.csv", COLUMNS)
    assert isinstance(text, str)
    assert (text[:4], label) == ("café", "1")


def test_a_damaged_place_in_utf8_is_no_other_encoding(tmp_path):
    (tmp_path / "a.csv").write_bytes("text,label\ncafé,1\n".encode() + b"caf\xe9,2\n")
    with pytest.raises(DataError, match=r"\(byte 0xe9 at offset 22\); it is UTF-8 up to there: correct that place$"):
        list(read_records(tmp_path / "a.csv", COLUMNS))


def test_the_wrong_byte_of_a_large_file_is_found_where_it_is(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'["x", 1]\n' * 300_000 + b'["caf\xe9", 2]\n')
    with pytest.raises(DataError, match=r"\(byte 0xe9 at offset 2700005\); it looks like cp1252"):
        list(read_records(tmp_path / "a.jsonl", COLUMNS))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(tmp_path):
    path = write(tmp_path / "a.json", text=["x"], label=[1])
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        list(read_records(path, COLUMNS))


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    path = write(tmp_path / "a.parquet", body=["x"], label=[1])
    with pytest.raises(DataError, match=r"no column 'text' \(found: body, label\)"):
        list(read_records(path, COLUMNS))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_reading_parquet_starts_no_threads(tmp_path):
    path = write(tmp_path / "a.parquet", text=TEXTS, label=[0, 1, 0, 1])
    code = (
        "import os, sys, pyarrow.parquet; from pathlib import Path; from distcore.data.files import read_records;"
        "before = len(os.listdir('/proc/self/task'));"
        "list(read_records(Path(sys.argv[1]), {'columns.text': 'text', 'columns.label': 'label'}));"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    assert subprocess.check_output([sys.executable, "-c", code, path], text=True).strip() == "0"
