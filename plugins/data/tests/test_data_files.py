import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from data_cases import TEXTS, write

from distcore import DataError
from distcore_data import IndexedRows, data_format, source_columns
from distcore_data.files import read_records, source_digest

COLUMNS = {"columns.text": "text", "columns.label": "label"}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_every_format_gives_the_same_records(tmp_path, suffix):
    path = write(
        tmp_path / f"data{suffix}", question=TEXTS, context=TEXTS[::-1], answer=["a", "b", "c", "d"]
    )
    columns = {
        "columns.question": "question",
        "columns.context": "context",
        "columns.answer": "answer",
    }
    assert list(read_records(path, columns)) == list(zip(TEXTS, TEXTS[::-1], "abcd", strict=True))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_only_the_columns_asked_for_are_returned_in_the_order_asked_for(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", id=["7"], label=["a"], text=["x"])
    assert list(read_records(path, COLUMNS)) == [("x", "a")]


def test_csv_values_are_strings(tmp_path):
    assert list(read_records(write(tmp_path / "data.csv", text=["x"], label=[1]), COLUMNS)) == [
        ("x", "1")
    ]


def test_json_takes_objects_and_jsonl_takes_arrays(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "x", "label": 0, "id": 7}]')
    (tmp_path / "a.jsonl").write_text('["x", 0]\n\n["y", 1]\n')
    assert list(read_records(tmp_path / "a.json", COLUMNS)) == [("x", 0)]
    assert list(read_records(tmp_path / "a.jsonl", COLUMNS)) == [("x", 0), ("y", 1)]


def test_a_csv_file_without_a_header_is_told_to_get_one(tmp_path):
    (tmp_path / "a.csv").write_text("that sad film was long,neg\ngood film,pos\nbad film,neg\n")
    message = (
        "its first line is no header but a row, because other rows have 'neg', too; add the line"
        " text,label above"
    )
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / "a.csv", COLUMNS))


@pytest.mark.parametrize(
    "header", ["Review Text,Rating", "the review,stars given", "Text,Label (0 or 1)", "a b,c d"]
)
def test_a_header_whose_names_have_spaces_is_no_row(tmp_path, header):
    """Who puts ``text,label`` above it, as once was advised, trains a class of the
    name of the column.
    """
    (tmp_path / "a.csv").write_text(
        f"{header}\n" + "".join(f"row {row},{row % 2}\n" for row in range(9))
    )
    listed = re.escape(header.replace(",", ", "))
    with pytest.raises(
        DataError, match=rf"no column 'text'.* \(found: {listed}\); name it with --set"
    ) as caught:
        list(read_records(tmp_path / "a.csv", COLUMNS))
    assert "above" not in str(caught.value)
    text, label = header.split(",")
    named = list(read_records(tmp_path / "a.csv", {"columns.text": text, "columns.label": label}))
    assert named[:2] == [("row 0", "0"), ("row 1", "1")]


@pytest.mark.parametrize(
    "first", ["which film did you like,what was it", "name,2019", "that sad film was long,neg"]
)
def test_a_first_line_that_may_be_either_is_left_to_the_user(tmp_path, first):
    (tmp_path / "a.csv").write_text(f"{first}\none,two\n")
    message = (
        "name it with .*; if the first line is a row and no header, add the line text,label"
        " above it$"
    )
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / "a.csv", COLUMNS))


def test_a_header_that_is_advised_has_as_many_names_as_rows_have_values(tmp_path):
    (tmp_path / "a.csv").write_text("film,neg,7\nfilm,pos,8\n")
    with pytest.raises(DataError, match=r"add the line (text,label,column3) above it") as caught:
        list(read_records(tmp_path / "a.csv", COLUMNS))
    header = str(caught.value).partition("add the line ")[2].partition(" above")[0]
    (tmp_path / "a.csv").write_text(f"{header}\nfilm,neg,7\nfilm,pos,8\n")
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [("film", "neg"), ("film", "pos")]


def test_a_header_among_the_rows_as_where_files_were_joined_is_a_bad_row(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nx,a\ntext,label\ny,b\n")
    with pytest.raises(DataError, match=r"a\.csv, row 2: repeats the header"):
        list(read_records(tmp_path / "a.csv", COLUMNS))


def test_two_columns_of_one_name_are_refused_where_it_is_asked_for(tmp_path):
    (tmp_path / "a.csv").write_text("text,text,label\nx,y,a\n")
    with pytest.raises(DataError, match="two columns are named 'text'; rename one of them"):
        list(read_records(tmp_path / "a.csv", COLUMNS))
    (tmp_path / "a.csv").write_text("text,other,other,label\nx,y,z,a\n")
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [("x", "a")]


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
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [
        ("good, better; best", "a"),
        ("b\tad", "b"),
    ]


def test_a_delimiter_among_the_words_of_a_header_separates_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("a;b;c;d,text,label\n1,x,a\n")
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [("x", "a")]


def test_lines_of_a_csv_file_may_end_as_on_windows_and_values_may_hold_line_ends(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbftext,label\r\n"one\r\ntwo",a\r\n"three ""3""\nfour",b\r\n'
    )
    assert list(read_records(tmp_path / "a.csv", COLUMNS)) == [
        ("one\r\ntwo", "a"),
        ('three "3"\nfour', "b"),
    ]


BAD = {
    "empty file": ("a.json", "", "is empty"),
    "unknown extension": (
        "a.xml",
        "x",
        (
            r"unknown extension '.xml' \(known: .arrow, .csv, .json, .jsonl, .*, .tar, .txt, .tsv,"
            r" .list, also with .gz, .zst, .bz2 or .xz\)"
        ),
    ),
    "bad json": ("a.json", '[["x", 1],\n["y" 2]]', "line 2, column 6: not valid JSON"),
    "bad jsonl": ("a.jsonl", '["x", 1]\n["y", 2\n', "line 2, column"),
    "a key twice": (
        "a.jsonl",
        '{"text": "a", "label": 0, "text": "b"}\n',
        "not usable JSON: one object has the key 'text' twice",
    ),
    "deep json": ("a.json", "[" * 200_000, "not usable JSON"),
    "top-level object": ("a.json", '{"a": 1}', "expected a list of .* found an object with 1 keys"),
    "three values": (
        "a.json",
        '[["x", 1], ["y", 1, 2]]',
        r"row 2: expected \[text, label\] .* a list of 3 values",
    ),
    "bare string": ("a.jsonl", '"x"', "row 1: expected .* found a string \\('x'\\)"),
    "missing key": (
        "a.jsonl",
        '{"text": "x", "lable": 1}',
        r"row 1: no column 'label' \(did you mean 'lable'\?\)",
    ),
    "missing column": (
        "a.csv",
        "texts,label\nx,1\n",
        r"no column 'text' \(did you mean 'texts'\?\) .*columns.text=NAME",
    ),
    "missing column, semicolons": (
        "a.csv",
        "review;stars\nx;1\n",
        r"no column 'text' \(found: review, stars\)",
    ),
    "short csv row": (
        "a.csv",
        "text,label\nx,1\ny\n",
        "row 2: expected 2 values as in the header, found 1",
    ),
    "open quote": ("a.csv", 'text,label\n"x,1\n', "not valid CSV"),
    "not parquet": ("a.parquet", "not parquet at all", "not a readable Parquet file"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD.keys())
def test_bad_content_is_one_line_that_names_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(
        DataError, match=f"^data file {re.escape(str(tmp_path / name))}.*{message}"
    ) as caught:
        list(read_records(tmp_path / name, COLUMNS))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        read_records(tmp_path / "none.json", COLUMNS)
    with pytest.raises(DataError, match="is a folder, expected a file, files"):
        read_records(tmp_path, COLUMNS)


@pytest.mark.parametrize(
    "suffix", [".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".tar", ".csv.gz"]
)
def test_a_pointer_of_git_lfs_is_no_data(tmp_path, suffix):
    """Its lines were trained on as texts."""
    file = tmp_path / f"a{suffix}"
    file.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    )
    with pytest.raises(
        DataError, match=r"a\S+: is a pointer of Git LFS, not the file; fetch it: git lfs pull$"
    ):
        list(read_records(file, {"columns.text": "text"}))


def partitioned(folder: Path) -> Path:
    for label in (0, 1):
        (folder / f"label={label}").mkdir(parents=True)
        write(folder / f"label={label}/part-0.parquet", text=["x", "y"])
    return folder


def test_a_column_that_is_in_the_names_of_folders_is_named(tmp_path):
    folder = partitioned(tmp_path / "rows")
    with pytest.raises(
        DataError,
        match=r"rows: is partitioned by label, which is in the names of folders; .*/\*\*/\*",
    ):
        list(read_records(folder, COLUMNS))
    pattern = folder / "**/*.parquet"
    assert len(list(read_records(pattern, {"columns.text": "text"}))) == 4
    with pytest.raises(
        DataError,
        match=r"part-0.parquet: the column 'label' is in the names of its folders \(label=…",
    ):
        list(read_records(pattern, COLUMNS))


ENCODINGS = {
    "western": (
        "text,label\ncafé – “good”,1\n".encode("cp1252"),
        "it looks like cp1252; convert it: iconv -f cp1252",
    ),
    "utf-16": (
        "text,label\ncafé,1\n".encode("utf-16"),
        "it looks like utf-16; convert it: iconv -f utf-16",
    ),
    "chinese": (
        "text,label\n银色的高跟鞋很好,1\n".encode("gb18030"),
        "with its encoding for ENCODING: iconv -f ENCODING",
    ),
}


@pytest.mark.parametrize(("content", "message"), ENCODINGS.values(), ids=ENCODINGS.keys())
def test_text_in_another_encoding_is_refused_with_what_it_looks_like(tmp_path, content, message):
    (tmp_path / "my rows.csv").write_bytes(content)
    with pytest.raises(
        DataError, match=r"not UTF-8 text \(byte 0x\w\w at offset \d+\); "
    ) as caught:
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
    with pytest.raises(
        DataError, match=r"\(byte 0xe9 at offset 22\); it is UTF-8 up to there: correct that place$"
    ):
        list(read_records(tmp_path / "a.csv", COLUMNS))


@pytest.mark.programs
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


@pytest.mark.programs
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_reading_parquet_starts_no_threads(tmp_path):
    path = write(tmp_path / "a.parquet", text=TEXTS, label=[0, 1, 0, 1])
    code = (
        "import os, sys, pyarrow.parquet; from pathlib import Path; from distcore_data.files import"
        " read_records;before ="
        " len(os.listdir('/proc/self/task'));list(read_records(Path(sys.argv[1]), {'columns.text':"
        " 'text', 'columns.label': 'label'}));print(len(os.listdir('/proc/self/task')) - before)"
    )
    assert subprocess.check_output([sys.executable, "-c", code, path], text=True).strip() == "0"


def test_a_json_file_may_have_an_object_per_line(tmp_path):
    (tmp_path / "train.json").write_text('\n{"text": "x", "label": 0}\n{"text": "y", "label": 1}\n')
    assert list(read_records(tmp_path / "train.json", COLUMNS)) == [("x", 0), ("y", 1)]
    (tmp_path / "one.json").write_text('{"text": "x", "label": 0}\n')
    assert list(read_records(tmp_path / "one.json", COLUMNS)) == [("x", 0)]
    (tmp_path / "half.json").write_text('{"text": "x", "label": 0}\n{"text": "y", ')
    with pytest.raises(DataError, match=r"half.json, line 2, column \d+: not valid JSON"):
        list(read_records(tmp_path / "half.json", COLUMNS))


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".txt"])
@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_file_may_be_compressed(tmp_path, suffix, compression):
    import pyarrow as pa

    path = tmp_path / f"a{suffix}"
    columns = {"columns.text": "text"} if suffix == ".txt" else COLUMNS
    if suffix == ".txt":
        path.write_text("x\n\ny\n")
    else:
        write(path, text=["x", "y"], label=["a", "b"])
    packed = path.with_name(path.name + compression)
    with pa.CompressedOutputStream(
        str(packed), {".gz": "gzip", ".zst": "zstd"}[compression]
    ) as file:
        file.write(path.read_bytes())
    assert list(read_records(packed, columns)) == list(read_records(path, columns))
    packed.write_bytes(packed.read_bytes()[:-6])
    with pytest.raises(
        DataError, match=rf"{re.escape(packed.name)}(, line \d: cannot be read|: is empty)"
    ):
        list(read_records(packed, columns))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows"])
def test_a_pipe_is_refused_with_the_reason(tmp_path, name):
    """It is not opened: without a writer that would wait forever."""
    os.mkfifo(tmp_path / name)
    line = (
        rf"{name}: is a pipe or a device, which is read once, so a resume could not .*; write its"
        r" rows to a file$"
    )
    with pytest.raises(DataError, match=line):
        read_records(tmp_path / name, COLUMNS)


def test_several_files_a_folder_and_a_pattern_are_read_one_after_the_other(tmp_path):
    for name, text in (("b.jsonl", "y"), ("a.jsonl", "x"), ("c.jsonl", "z")):
        write(tmp_path / name, text=[text], label=[0])
    (tmp_path / "notes.md").write_text("nothing")
    named = f"{tmp_path}/b.jsonl, {tmp_path}/a.jsonl"
    for source, texts in ((tmp_path, "xyz"), (tmp_path / "[ab].jsonl", "xy"), (Path(named), "yx")):
        assert [text for text, _ in read_records(source, COLUMNS)] == list(texts)
    assert source_digest(tmp_path) != source_digest(tmp_path / "[ab].jsonl")


def test_files_that_are_not_there_or_of_several_kinds_are_one_line(tmp_path):
    write(tmp_path / "a.jsonl", text=["x"], label=[0])
    write(tmp_path / "a.csv", text=["x"], label=[0])
    with pytest.raises(
        DataError, match=r"are of several kinds \(.csv, .jsonl\); give those of one kind"
    ):
        list(read_records(tmp_path / "a.*", COLUMNS))
    with pytest.raises(DataError, match=r"b\.\*: no file has such a name"):
        list(read_records(tmp_path / "b.*", COLUMNS))
    with pytest.raises(DataError, match=r"b\.csv: no such file \(did you mean 'a.csv'"):
        list(read_records(Path(f"{tmp_path}/a.csv,{tmp_path}/b.csv"), COLUMNS))
    (tmp_path / "none").mkdir()
    for part, problem in (
        ("none", "is a folder without data files"),
        ("b.*", "no file has such a name"),
    ):
        with pytest.raises(DataError) as error:
            list(read_records(Path(f"{tmp_path}/a.csv,{tmp_path}/{part}"), COLUMNS))
        assert str(error.value) == f"data files {tmp_path}/{part}: {problem}"


def test_a_line_of_a_txt_file_is_a_text_and_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_text("one\r\n\n two \n")
    assert list(read_records(tmp_path / "a.txt", {"columns.text": "body"})) == [
        ("one",),
        (" two ",),
    ]
    with pytest.raises(
        DataError, match=r"a\.txt: a \.txt file has texts alone, no column 'label'; a \.csv"
    ):
        list(read_records(tmp_path / "a.txt", COLUMNS))


NESTED = {"columns.source": "translation.zh", "columns.target": "translation.en"}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_a_column_inside_another_has_a_dot_in_its_name(tmp_path, suffix):
    rows = [{"zh": "好", "en": "good"}, None, {"zh": None, "en": "bad"}]
    path = write(tmp_path / f"wmt{suffix}", translation=rows)
    if suffix == ".json":
        path.write_text(json.dumps([{"translation": row} for row in rows]))
    assert list(read_records(path, NESTED)) == [("好", "good"), (None, None), (None, "bad")]
    with pytest.raises(
        DataError, match=r"no column 'translation.xx' .*translation.zh, translation.en"
    ):
        list(read_records(path, {"columns.source": "translation.xx"}))
    if suffix != ".parquet":
        with pytest.raises(
            DataError, match=r"no column 'zh' .*found: translation.zh, translation.en\)"
        ):
            list(read_records(path, {"columns.source": "zh"}))


def test_a_name_with_a_dot_may_be_that_of_a_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a.b": 1, "a": {"b": 2}}\n')
    assert list(read_records(tmp_path / "a.jsonl", {"columns.x": "a.b"})) == [(1,)]


def test_a_tsv_file_has_tabs_whatever_its_texts_have(tmp_path: Path) -> None:
    columns = {"columns.text": "text", "columns.label": "label"}
    (tmp_path / "a.tsv").write_text('text\tlabel\na, b; c\t1\n"two\nlines"\t2\n')
    (tmp_path / "b.TSV.gz").write_bytes(gzip.compress(b"label\ttext\n3\tx,y\n"))
    (tmp_path / "one.tsv").write_text("a;text,b\ntab-less, row\n")
    rows = [("a, b; c", "1"), ("two\nlines", "2"), ("x,y", "3")]
    assert list(read_records(tmp_path / "a.tsv", columns)) == rows[:2]
    # As .csv these would be cut at commas, of which their headers have more.
    (tmp_path / "odd.tsv").write_text('a,b,c\tlabel\nx,"y\t1\n')
    assert source_columns(tmp_path / "odd.tsv") == ["a,b,c", "label"]
    assert IndexedRows(tmp_path / "odd.tsv", {"columns.label": "label"})[[0]] == [("1",)]
    whole = {"columns.text": "a;text,b"}
    assert list(read_records(tmp_path / "one.tsv", whole)) == [("tab-less, row",)]
    source = Path(f"{tmp_path}/a.tsv,{tmp_path}/b.TSV.gz")
    assert IndexedRows(source, columns)[[2, 0, 1]] == [rows[2], *rows[:2]]
    assert data_format(source) == ".csv"
    (tmp_path / "rows").mkdir()
    shutil.copy(tmp_path / "a.tsv", tmp_path / "rows")
    assert list(read_records(tmp_path / "rows", columns)) == rows[:2]


AS_WRITTEN = ["007", "NA", "null", "None", "nan", "true", "1e5", "2024-01-02", str(2**70), " a "]
"""Texts that other readers make numbers, nulls, truth values or dates of."""
TEXT_FORMATS: dict[str, Callable[[str], str]] = {
    "csv": lambda value: f'text\n"{value}"\n',
    "tsv": lambda value: f"text\n{value}\n",
    "txt": lambda value: f"{value}\n",
    "jsonl": lambda value: json.dumps({"text": value}) + "\n",
    "json": lambda value: json.dumps([{"text": value}]),
}


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_a_text_stays_as_it_is_written(form: str, tmp_path: Path) -> None:
    for number, value in enumerate(AS_WRITTEN):
        file = tmp_path / f"{number}.{form}"
        file.write_text(TEXT_FORMATS[form](value))
        for columns in ({"columns.text": "text"}, {"columns.text": "text", "columns.id?": "id"}):
            others = () if len(columns) == 1 else (None,)
            assert list(read_records(file, columns)) == [(value, *others)]
            assert IndexedRows(file, columns)[[0]] == [(value, *others)]


@pytest.mark.parametrize("form", ["parquet", "arrow", "tar"])
def test_a_text_of_columns_and_members_stays_as_it_is_written(form: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import shard_cases
    from pyarrow import ipc
    from pyarrow import parquet as pq

    file = tmp_path / f"rows.{form}"
    table = pa.table({"text": AS_WRITTEN})
    if form == "parquet":
        pq.write_table(table, file)
    elif form == "arrow":
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        shard_cases.tar(file, [{"txt": value.encode()} for value in AS_WRITTEN])
    assert list(read_records(file, {"columns.text": "text"})) == [(value,) for value in AS_WRITTEN]


def test_numbers_of_json_stay_as_they_are_written(tmp_path: Path) -> None:
    values = [2**70, 2**53 + 1, 0.1, True, None, "007", [1, "a"], {"b": None}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    read = [value for (value,) in read_records(file, {"columns.text": "text"})]
    assert read == values
    assert list(map(type, read)) == list(map(type, values))
