"""Rows that a program has in memory: they are kept exactly, once, in a bounded place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcore import DataError
from distcore_data import in_memory, reader
from distcore_data.in_memory import store

pd: Any = pytest.importorskip("pandas")
COLUMNS = {"columns.text": "text", "columns.label": "label"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of rows in the cache, which is not there yet."""
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/rows"


def kept(rows: object) -> list[dict[str, Any]]:
    """The rows as they are kept."""
    return [json.loads(line) for line in Path(store(rows)).read_text().splitlines()]


VALUES: list[dict[str, Any]] = [
    {"text": "ü \n 🙂", "label": 2**62 + 1, "score": 0.1, "words": ["a", 1], "more": {"x": None}},
    {"text": "", "label": -1, "score": 1e-300, "words": [], "more": {}},
]


def test_values_are_kept_exactly() -> None:
    assert kept(VALUES) == VALUES
    assert kept(tuple(VALUES)) == VALUES
    assert kept(pd.DataFrame(VALUES)) == VALUES
    third = np.float32(1 / 3)
    numbers = [{"a": third, "b": np.int8(-3), "c": np.bool_(True), "d": np.array([[1, 2]])}]
    assert kept(numbers) == [{"a": float(third), "b": -3, "c": True, "d": [[1, 2]]}]


def test_a_table_of_pyarrow_has_the_same_rows() -> None:
    pa = pytest.importorskip("pyarrow")
    rows = [{"text": row["text"], "label": row["label"]} for row in VALUES]
    assert kept(pa.Table.from_pylist(rows)) == rows


def test_what_a_frame_lacks_is_null_and_integers_stay_integers() -> None:
    frame = pd.DataFrame(
        {
            "text": pd.array(["a", None], dtype="string"),
            "label": pd.array([1, None], dtype="Int64"),
            "kind": pd.Categorical(["x", None]),
            "score": [0.5, float("nan")],
        },
        index=[7, 9],
    )
    assert kept(frame) == [
        {"text": "a", "label": 1, "kind": "x", "score": 0.5},
        {"text": None, "label": None, "kind": None, "score": None},
    ]


def test_the_same_rows_have_one_path_and_others_another(cache: Path) -> None:
    rows = [{"text": "a", "label": 1}]
    path = store(rows)
    assert store(pd.DataFrame(rows)) == path
    assert store([{"text": "a", "label": True}]) != path
    assert store([{"text": "a", "label": 1.0}]) != path
    assert len(list(cache.iterdir())) == 3


def test_a_dataset_keeps_the_names_of_its_classes_and_the_order_of_its_rows() -> None:
    datasets: Any = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 1]}, features)
    shuffled = rows.select([2, 0])
    path = Path(store(shuffled))
    assert [*reader.read(path, COLUMNS)] == [("c", "good"), ("a", "bad")]
    assert store(datasets.Dataset.from_list([*shuffled], features)) == str(path)
    assert store(rows) != str(path)
    other = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["good", "bad"])}
    )
    assert store(datasets.Dataset.from_list([*shuffled], other)) != str(path)
    with pytest.raises(DataError, match="a DatasetDict with the splits train, test; give one"):
        store(datasets.DatasetDict(train=rows, test=rows))
    with pytest.raises(DataError, match=r"a IterableDataset; give a datasets\.Dataset"):
        store(rows.to_iterable_dataset())


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"text": "a"}, {"text": b"b"}], r"^rows given in memory, row 2: 'text' is a bytes, exp"),
        ([{"x": float("nan")}], r"row 1: 'x' is nan, which no number of JSON is; None is missing"),
        ([{"x": [1.0, float("inf")]}], r"row 1: 'x' is inf"),
        ([{1: "a"}], r"row 1: a column is named 1; name each by a text"),
        ([{"x": 1}, 2], r"row 2: a int, expected a dict"),
        ([{"x": "\ud800"}], r"row 1: not valid text: it has half of a surrogate pair"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), r"two columns 'a'; rename one"),
        (pd.DataFrame({"t": [pd.Timestamp(0)]}), r"row 1: 't' is a Timestamp, expected text"),
        ({"text": ["a"]}, r"a dict; expected a DataFrame, a pyarrow\.Table"),
    ],
)
def test_what_cannot_be_kept_exactly_is_one_line_and_leaves_nothing(
    rows: object, line: str, cache: Path
) -> None:
    with pytest.raises(DataError, match=line):
        store(rows)
    assert not list(cache.iterdir())


def test_the_place_is_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(in_memory.LIMIT, "70")
    paths = []
    for number in range(3):
        paths.append(Path(store([{"text": f"{number}" * 20}])))
        os.utime(paths[-1], (number, number))
    assert [path.exists() for path in paths] == [False, True, True]
    store([{"text": "1" * 20}])  # was given again, and is no longer the oldest
    store([{"text": "3" * 20}])
    assert [path.exists() for path in paths] == [False, True, False]
    (cache / ".draft-killed").mkdir()
    os.utime(cache / ".draft-killed", (0, 0))
    with pytest.raises(DataError, match=r"take 113 bytes, over DISTCORE_ROWS_BYTES=70; raise it"):
        store([{"text": "x" * 100}])
    store([{"text": "4" * 20}])
    assert not (cache / ".draft-killed").exists()
