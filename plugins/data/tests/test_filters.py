"""Rows kept by a column and a regular expression."""

from pathlib import Path

import pytest
from data_cases import write

from distcore import DataError
from distcore_data.files import check_source, data_format, read_records, source_digest, source_name
from distcore_data.filters import Filtered

TEXT = {"columns.text": "text"}
ROWS = {"text": ["好", "good", "fine", None], "lang": ["zh", "en", "zh-TW", None]}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("matches", "kept"), [("^zh$", ["好"]), ("zh", ["好", "fine"]), (".", ["好", "good", "fine"])]
)
def test_rows_in_which_the_column_matches_are_kept(
    tmp_path: Path, suffix: str, matches: str, kept: list[str]
) -> None:
    path = write(tmp_path / f"rows{suffix}", **ROWS)
    assert [text for (text,) in read_records(Filtered(path, "lang", matches), TEXT)] == kept


def test_a_filter_reads_columns_of_rows_in_any_form(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[["x", true], ["y", false]]')
    assert list(read_records(Filtered(tmp_path / "a.json", "good", "^true$"), TEXT)) == [("x",)]
    (tmp_path / "a.csv").write_text("text;score\nx;1.5\ny;25\n")
    assert list(read_records(Filtered(tmp_path / "a.csv", "score", r"^\d+$"), TEXT)) == [("y",)]
    (tmp_path / "a.jsonl").write_text(
        '{"text": "x", "tags": ["a", "好"]}\n{"text": "y", "tags": null}\n'
    )
    assert list(read_records(Filtered(tmp_path / "a.jsonl", "tags", r'^\["a", "好"\]$'), TEXT)) == [
        ("x",)
    ]
    assert list(read_records(Filtered(tmp_path / "a.jsonl", "tags", "."), TEXT)) == [("x",)]
    (tmp_path / "a.txt").write_text("# title\nline\n")
    assert list(read_records(Filtered(tmp_path / "a.txt", "text", "^[^#]"), TEXT)) == [("line",)]
    (tmp_path / "a.jsonl").write_text(
        '{"text": "x", "meta": {"lang": "zh"}}\n{"text": "y", "meta": null}\n'
    )
    assert list(read_records(Filtered(tmp_path / "a.jsonl", "meta.lang", "zh"), TEXT)) == [("x",)]


@pytest.mark.parametrize(
    ("column", "matches", "message"),
    [
        (
            "lang",
            "fr",
            r"^data file \S+rows.jsonl: lang of no row matches 'fr'; change filter.matches$",
        ),
        (
            "lan",
            "zh",
            r"row 1: no column 'lan' \(did you mean 'lang'\?\) .*--set filter.column=NAME$",
        ),
    ],
)
def test_a_column_that_cannot_be_filtered_is_one_line(
    tmp_path: Path, column: str, matches: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "x", "lang": "zh", "tags": ["x"]}\n')
    with pytest.raises(DataError, match=message):
        list(read_records(Filtered(tmp_path / "rows.jsonl", column, matches), TEXT))
    with pytest.raises(DataError, match="no such file"):
        read_records(Filtered(tmp_path / "none.jsonl", column, matches), TEXT)


def test_the_name_and_the_digest_of_rows_have_the_filter(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", **ROWS)
    all_rows, some, others = path, Filtered(path, "lang", "zh"), Filtered(path, "lang", "en")
    check_source(some)
    assert data_format(some) == ".jsonl"
    assert source_name(some) == f"data file {path} where lang matches 'zh'"
    assert len({source_digest(source) for source in (all_rows, some, others)}) == 3
    assert source_digest(some) == source_digest(Filtered(path, "lang", "zh"))
