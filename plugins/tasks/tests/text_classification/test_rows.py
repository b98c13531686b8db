import re
from contextlib import nullcontext

import pytest
from data_cases import TEXTS, write
from label_cases import read_labeled, texts_of

from distcore.errors import DataError
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.problems.single_label import SingleLabel

COLUMNS = Columns()


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize(
    "labels", [[0, 1, 2, 10], ["b", "a", "b", "喜"]], ids=["integers", "strings"]
)
def test_every_format_gives_the_same_rows(tmp_path, suffix, labels):
    rows = read_labeled(write(tmp_path / f"data{suffix}", text=TEXTS, label=labels), COLUMNS)
    assert (texts_of(rows), [*rows.labels]) == (TEXTS, labels)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_columns_can_be_renamed(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", review=["a", "b"], stars=[1, 5])
    assert [*read_labeled(path, Columns(text="review", label="stars")).labels] == [1, 5]


def test_csv_labels_with_leading_zeros_stay_strings(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,label\nx,01\ny,1\n")
    assert [*read_labeled(path, COLUMNS).labels] == ["01", "1"]


BAD = {
    "no rows": ("a.json", "[]", "holds no rows"),
    "blank lines only": ("a.jsonl", "\n\n", "holds no rows"),
    "header only": ("a.csv", "text,label\n", "holds no rows"),
    "text number": ("a.json", "[[1, 1]]", r"row 1: text is an integer \(1\), expected a string"),
    "text null": ("a.jsonl", '{"text": null, "label": 1}', r"row 1: text is missing \(null\)"),
    "text blank": ("a.json", '[["x", 1], [" ", 1]]', "row 2: text is empty"),
    "text surrogate": (
        "a.json",
        '[["x\\ud800", 1]]',
        "row 1: text is not valid Unicode: lone surrogate at character 2",
    ),
    "label float": (
        "a.json",
        '[["x", 1.5]]',
        (
            r"row 1: label is a float \(1.5\), expected an integer or a string; for"
            r" .*--problem-type regression"
        ),
    ),
    "label null beside floats": (
        "a.json",
        '[["x", 0.0], ["y", 1.0], ["z", null]]',
        (
            r"row 1: label is a float \(0.0\), .*; labels of other rows are missing \(null\), .*"
            r" save the others as int"
        ),
    ),
    "label nan": (
        "a.json",
        '[["x", "a"], ["y", NaN]]',
        r"row 2: label is missing \(null\): fill it in or remove",
    ),
    "label boolean": ("a.json", '[["x", true]]', "row 1: label is a boolean"),
    "label list": ("a.json", '[["x", [1]]]', "row 1: label is a list of 1 values"),
    "label empty": ("a.csv", "text,label\nx,a\ny,\n", "row 2: label is empty"),
    "label negative": ("a.csv", "text,label\nx,1\ny,-1\n", "row 2: label -1 is out of range"),
    "labels mixed": (
        "a.json",
        '[["x", 1], ["y", "b"]]',
        r"row 2: label is a string \('b'\), but row 1 has an integer",
    ),
}


@pytest.mark.parametrize(
    ("labels", "is_refused"), [("0.5 1.25 -.75", True), ("0.5 0.5 1.5", False), ("a b c", False)]
)
def test_numbers_of_which_each_row_has_another_are_no_classes(tmp_path, labels, is_refused):
    file = tmp_path / "a.csv"
    file.write_text("text,label\n" + "".join(f"x,{label}\n" for label in labels.split()))
    said = r"row 1: label -.75 is a number, and each row has another; .*--problem-type regression$"
    with pytest.raises(DataError, match=said) if is_refused else nullcontext():
        SingleLabel().classes(read_labeled(file, COLUMNS))


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_row_is_one_line_that_names_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(
        DataError, match=f"^data file {re.escape(str(tmp_path / name))}.*{message}"
    ) as caught:
        read_labeled(tmp_path / name, COLUMNS)
    assert "\n" not in str(caught.value)


def test_rows_have_a_length(tmp_path):
    assert len(read_labeled(write(tmp_path / "a.jsonl", text=["a", "b"], label=[0, 1]))) == 2
