"""Numbers of classes become the names that the features of datasets keep, in lists and structs
and in every format.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distcore import DataError
from distcore_data import Filtered, IndexedRows, Split, find_split, read_records, room, skipping
from distcore_data.indexes import copies

CLASS = {"names": ["no", "yes"], "_type": "ClassLabel"}
TEXT = {"dtype": "string", "_type": "Value"}
LIST = {"feature": CLASS, "_type": "Sequence"}
FEATURES: dict[str, Any] = {
    "one": CLASS,
    "list": LIST,
    "new list": {"feature": CLASS, "_type": "List"},
    "large list": {"feature": CLASS, "_type": "LargeList"},
    "old list": [CLASS],
    "lists of lists": {"feature": LIST, "_type": "Sequence"},
    "struct": {"word": TEXT, "tag": CLASS, "tags": LIST},
    "list of structs": [{"word": TEXT, "tag": CLASS}],
    "struct of lists": {"feature": {"word": TEXT, "tag": CLASS}, "_type": "Sequence"},
    "text": TEXT,
    "without names": {"num_classes": 2, "_type": "ClassLabel"},
}
"""Features as datasets writes them, now and in earlier versions."""
VALUES: dict[str, Any] = {
    "one": (1, "yes"),
    "list": ([0, 1, -1], ["no", "yes", None]),
    "new list": ([1], ["yes"]),
    "large list": ([1], ["yes"]),
    "old list": ([0, 0], ["no", "no"]),
    "lists of lists": ([[0], [1, 0]], [["no"], ["yes", "no"]]),
    "struct": ({"word": "a", "tag": 1, "tags": [0]}, {"word": "a", "tag": "yes", "tags": ["no"]}),
    "list of structs": ([{"word": "a", "tag": 0}], [{"word": "a", "tag": "no"}]),
    "struct of lists": ({"word": ["a"], "tag": [1]}, {"word": ["a"], "tag": ["yes"]}),
    "text": ("one", "one"),
    "without names": (1, 1),
}
"""A value of each feature, and what a reader gives."""
INSIDE = {"struct.tag": "yes", "struct.tags": ["no"], "struct of lists.tag": ["yes"]}
"""Columns inside others, and their values."""
FORMATS = ("parquet", "large parquet", "arrow", "stream", "split")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "HELD", Counter())


def written(
    folder: Path, form: str, rows: dict[str, list[Any]], features: dict[str, Any] = FEATURES
) -> Path | Split:
    """Write rows as datasets does, with the features in the metadata of the schema."""
    table = pa.table(rows)
    stored = json.dumps({"info": {"features": {column: features[column] for column in rows}}})
    table = table.replace_schema_metadata({"huggingface": stored, "pandas": "{}"})
    folder.mkdir(exist_ok=True)
    if form.endswith("parquet"):
        pq.write_table(table, folder / "rows.parquet")
        return folder / "rows.parquet"
    with (pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream)(
        folder / "rows.arrow", table.schema
    ) as file:
        file.write_table(table)
    if form != "split":
        return folder / "rows.arrow"
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "rows.arrow"}]}))
    split = find_split(str(folder))
    assert split
    return split


@pytest.mark.parametrize("form", FORMATS)
def test_classes_have_their_names_in_every_feature_and_format(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "large parquet":
        monkeypatch.setattr(copies, "LARGE", 1)
    source = written(
        tmp_path / "rows", form, {column: [value] * 2 for column, (value, _) in VALUES.items()}
    )
    named = {column: column for column in (*VALUES, *INSIDE)}
    expected = (*(value for _, value in VALUES.values()), *INSIDE.values())
    assert list(read_records(source, named)) == [expected] * 2
    assert IndexedRows(source, named)[[1]] == [expected], "by number, too"
    assert len(list((tmp_path / "cache/remote/pieces").glob("*.arrow"))) == (
        form == "large parquet"
    )
    assert (
        list(read_records(Filtered(source, "list", "yes"), {"columns.label": "one"}))
        == [("yes",)] * 2
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_number_without_a_name_is_named_by_its_row_and_may_be_passed_over(
    form: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "rows", form, {"list": [[0], [1, 2], [1]]})
    asked = {"columns.tags": "list"}
    problem = "row 2: label 2 is out of range: the dataset names 2 classes"
    with pytest.raises(DataError, match=problem):
        list(read_records(source, asked))
    with pytest.raises(DataError, match=problem):
        IndexedRows(source, asked)[[0, 1]]
    with skipping(1) as bad:
        assert list(read_records(source, asked)) == [(["no"],), (["yes"],)]
    assert len(list(bad.problems)) == 1


def test_files_that_number_the_same_classes_otherwise_are_mapped_by_name(tmp_path: Path) -> None:
    for name, names in {"a": ["no", "yes"], "b": ["yes", "no"]}.items():
        written(tmp_path / name, "parquet", {"one": [0, 1]}, {"one": CLASS | {"names": names}})
    both = Path(f"{tmp_path}/a/rows.parquet,{tmp_path}/b/rows.parquet")
    assert [label for (label,) in read_records(both, {"columns.label": "one"})] == [
        "no",
        "yes",
        "yes",
        "no",
    ]
