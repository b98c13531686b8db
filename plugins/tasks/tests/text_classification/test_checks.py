"""Warnings before training name the problem, its row and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distcore import DataError
from distcore.config import RunConfig
from distcore.jobs.dry_run import describe
from distcore.resolve.resolve import resolve
from distcore_tasks.text_classification.datasets import prepare_text
from distcore_tasks.text_classification.options import TextOptions


def options(path: Path, labels: Sequence[object], **others: object) -> TextOptions:
    """Options for a file with a short text for each of these labels."""
    if path.suffix == ".csv":
        path.write_text(
            "text,label\n" + "".join(f"row {row},{label}\n" for row, label in enumerate(labels))
        )
    else:
        path.write_text(json.dumps([[f"row {row}", label] for row, label in enumerate(labels)]))
    return replace(TextOptions(data=str(path), model="bert-tiny", eval_fraction=0.5), **others)  # type: ignore[arg-type]


def said(options: TextOptions) -> list[str]:
    return list(prepare_text(options, RunConfig()).warnings)


def test_rows_with_nothing_odd_are_silent(tmp_path):
    assert not said(options(tmp_path / "a.csv", [1, 2] * 20))
    assert not said(options(tmp_path / "a.json", ["a", "b", "7"] * 20))


def test_a_word_among_numbers_is_named_with_its_row(tmp_path):
    few = options(tmp_path / "a.csv", [1, 2, "five", 5] + [1, 2, 5] * 20)
    assert (
        said(few)[0]
        == f"data file {tmp_path}/a.csv: label 'five' in row 3 is no number and occurs once: so all"
        " labels are strings; correct it if it is a slip"
    )
    more = options(tmp_path / "a.csv", [1, 2, "five", 5, "n/a"] + [1, 2, 5] * 20)
    assert (
        "label 'five' in row 3 is no number and occurs once, and 1 more are like it: "
        in said(more)[0]
    )


def test_labels_that_differ_by_spaces_or_capitals_alone_are_named(tmp_path):
    (line,) = said(options(tmp_path / "a.json", ["good", "bad", "good ", "Bad"] * 10))
    assert line.endswith(
        "labels 'good' and 'good ' are two classes: correct them if they are meant to be one"
    )


def test_a_number_in_two_forms_is_two_classes_and_named(tmp_path):
    (line,) = said(options(tmp_path / "a.csv", ["0.0", "1.0", "0"] * 10))
    assert line.endswith(
        "labels '0.0' and '0' are two classes: correct them if they are meant to be one"
    )


def test_a_class_named_as_a_missing_value_is_named(tmp_path):
    (line,) = said(options(tmp_path / "a.csv", [0, "nan", 1] * 10))
    remedy = "if it stands for a missing label, fill it in or remove the rows"
    assert line == f"data file {tmp_path}/a.csv: label 'nan' in row 2 is a class; {remedy}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_below_another_is_no_class(stream, tmp_path):
    """A user who puts a line above a header, as a message may say, does not train on the header."""
    two = options(tmp_path / "a.csv", ["Rating", *[1, 2, 5] * 20], stream=stream)
    with pytest.raises(
        DataError,
        match=r"a\.csv, row 1: label 'Rating' is no number, as all others are; remove the",
    ):
        said(two)
    assert said(options(tmp_path / "b.csv", ["none", *[1, 2, 5] * 20, "none"], stream=stream))


@pytest.mark.parametrize("stream", [False, True])
def test_labels_in_two_unicode_forms_are_refused(stream, tmp_path):
    composed, parts = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    forms = (
        rf"{composed!r} is there in two Unicode forms \(NFC and NFD\), .*: convert all labels"
        r" to NFC"
    )
    mixed = options(tmp_path / "a.json", [composed, "bar", parts] * 20, stream=stream)
    with pytest.raises(DataError, match=rf"^data file \S+a\.json, rows 1 and 3: label {forms}$"):
        said(mixed)
    one = options(tmp_path / "b.json", [composed, "bar"] * 20, stream=stream)
    other = options(tmp_path / "c.json", [parts, "bar"] * 20)
    with pytest.raises(
        DataError,
        match=rf"c\.json, row 1: label .* is out of range: no training row has it: {forms}",
    ):
        said(replace(one, eval_data=other.data, eval_fraction=0.1))
    assert not said(one)


def test_words_that_several_rows_have_are_classes(tmp_path):
    assert not said(options(tmp_path / "a.csv", [1, 2, "other"] * 20))


def test_classes_with_fewer_than_three_rows_are_named_with_their_rows(tmp_path):
    (line,) = said(options(tmp_path / "a.json", ["a", "b", "c", "b"] + ["a", "d"] * 20))
    assert (
        line
        == f"data file {tmp_path}/a.json: classes with fewer than 3 rows, too few to learn from: "
        "'b' (rows 2 and 4), 'c' (row 3)"
    )


def test_rare_classes_are_counted_and_five_are_named(tmp_path):
    (line,) = said(options(tmp_path / "a.json", [*range(8), *[8, 9] * 20]))
    assert line.endswith(
        "'0' (row 1), '1' (row 2), '2' (row 3), '3' (row 4), '4' (row 5), … (8 classes)"
    )


def test_classes_that_are_rare_in_evaluation_are_named_with_what_to_do(tmp_path):
    (line,) = said(options(tmp_path / "a.json", ["a"] * 40 + ["b"] * 3))
    start = (
        f"data file {tmp_path}/a.json: classes with fewer than 3 evaluation rows, too few to judge"
        " by: 'b' ("
    )
    assert line.startswith(start)
    assert line.endswith("); raise --eval-fraction, or give --eval-data a file")


def test_the_rows_of_an_evaluation_file_are_looked_at_under_its_own_name(tmp_path):
    held_out = options(tmp_path / "held-out.json", ["a"] * 4 + ["b"]).data
    unused, line = said(options(tmp_path / "a.json", ["a", "b", "c"] * 4, eval_data=held_out))
    assert unused == "--eval-fraction 0.5: not used, because --eval-data names the rows"
    assert (
        line
        == f"data file {held_out}: classes with fewer than 3 evaluation rows, too few to judge by:"
        " 'b' (1), 'c' (0); add rows of them"
    )


def test_rows_that_are_cut_are_counted_and_rows_that_just_fit_are_not(tmp_path):
    # two tokens more with the special ones
    rows = [["word " * length, length % 2] for length in range(1, 41)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    cut = TextOptions(
        data=str(tmp_path / "a.json"), model="bert-tiny", eval_fraction=0.5, max_seq_len=40
    )
    (line,) = said(cut)
    assert (
        line
        == "2 of 40 rows have more than 40 tokens and are cut; --max-seq-len sets another length"
    )
    assert not said(replace(cut, max_seq_len=42))


def test_a_run_from_the_cache_says_the_same_under_the_name_of_its_own_file(tmp_path):
    labels = ["a", "b", "c"] + ["a", "b"] * 20
    first, second = (
        said(options(tmp_path / name, labels)) for name in ("first.json", "second.json")
    )
    assert second == [line.replace("first.json", "second.json") for line in first] != []


@pytest.mark.ranks
def test_a_run_on_two_ranks_says_it_once_before_its_first_step(tmp_path):
    few = options(tmp_path / "a.json", ["a", "b", "c"] + ["a", "b"] * 20)
    flags = (
        "--strategy ddp --nproc 2 --model bert-tiny --max-steps 2 --log-every 1 --out"
        f" {tmp_path}/run"
    )
    command = [sys.executable, "-m", "distcore", "train", "--data", few.data, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = (
        line
        for line in prepare_text(replace(few, eval_fraction=0.1), RunConfig()).warnings
        if "to learn from" in line
    )
    output = done.stderr + done.stdout
    assert output.count(line) == 1
    assert f"W rank 0: {line}\n" in done.stderr


def test_a_dry_run_shows_the_warnings_of_the_data(tmp_path):
    few = options(tmp_path / "a.json", ["a", "b", "c"] + ["a", "b"] * 20)
    (line,) = said(few)
    config = RunConfig(
        nproc=1, micro_batch_size=8, lr=1e-3, task_options={"data": few.data}, out="runs/x"
    )
    assert f"# warning: {line}\n" in describe(resolve(config), prepare_text(few, RunConfig()))
