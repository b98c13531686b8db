"""Labels of very many rows are those of a list, and take no memory for each row."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import LabeledTexts

from distcore import DataError
from distcore_data import skipping
from distcore_tasks.shared import arrays, splits
from distcore_tasks.shared.classification import coded
from distcore_tasks.shared.classification.checks import check_classes
from distcore_tasks.shared.classification.coded import CodedLabels, LabelCoder
from distcore_tasks.shared.classification.labels import distinct_labels, encode_labels, known_labels
from distcore_tasks.shared.classification.parts import split_parts
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.problems.multi_label import MultiLabel

ROWS = 4000


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few rows, so that some rows have several."""
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    for module in (arrays, coded, splits):
        monkeypatch.setattr(module, "BLOCK", 256)


def read(source: str) -> LabeledTexts:
    """There is no other source."""
    raise AssertionError(source)


def code(labels: Sequence[Any]) -> CodedLabels:
    coder = LabelCoder()
    for label in labels:
        coder.add(label)
    return coder.coded()


def both(labels: Sequence[Any]) -> tuple[LabeledTexts, LabeledTexts]:
    texts = ["a"] * len(labels)
    return LabeledTexts("x", texts, code(labels)), LabeledTexts("x", texts, labels)


def test_labels_of_any_type_are_told_apart() -> None:
    labels: list[Any] = [1, True, 1.0, "1", None, [1], [True], {"a": 1}, 1, "1"] * 100
    assert list(map(repr, code(labels))) == list(map(repr, labels))
    assert len(code(labels).names) == 8
    assert code([*range(300)]).codes.dtype == np.uint16
    left, rows = code(labels).without([0, 3])
    assert list(map(repr, left)) == [
        repr(label) for label in labels if repr(label) not in ("1", "'1'")
    ]
    assert [labels[row] for row in np.concatenate([*rows.blocks()])] == [*left]


@pytest.mark.parametrize(
    "labels",
    [
        [*("b", "a") * 1000, "rare", "A ", "7", *("c", "b") * 500, "rare"],
        [number % 7 for number in range(3000)],
        [["a", "b"], ["c"], [], ["c", "rare"]] + [["a"], ["b", "c"]] * 600,
    ],
    ids=["words", "numbers", "several of a row"],
)
def test_classes_warnings_and_unknown_labels_are_those_of_a_list(labels: list[Any]) -> None:
    some, others = both(labels)
    classes = list(map(str, distinct_labels(others)))
    assert distinct_labels(some) == distinct_labels(others)
    encode = MultiLabel().encode if isinstance(labels[0], list) else encode_labels
    encoded = encode(some, classes), encode(others, classes)
    assert np.array_equal(encoded[0][:], encoded[1][:])
    some_rows = np.array([len(labels) - 1, 0, 7])
    assert np.array_equal(encoded[0][some_rows], encoded[1][some_rows])
    judged = np.array([3] + [0] * (len(classes) - 1))
    assert [*check_classes(some, judged, classes, True)] == [
        *check_classes(others, judged, classes, True)
    ]
    for rows in (some, others):
        with pytest.raises(DataError, match=r"x, row \d+: label .* is out of range"):
            known_labels(rows, classes[1:])
    with skipping(ROWS) as bad:
        first = known_labels(some, classes[1:])
    with skipping(ROWS) as again:
        known = first, known_labels(others, classes[1:])
    assert np.array_equal(known[0].numbers, known[1].numbers)
    assert list(known[0].labels) == list(known[1].labels)
    assert [*bad.problems] == [*again.problems] != []


@pytest.mark.parametrize("drawn", [ROWS, ROWS - 1], ids=["drawn", "computed"])
def test_the_split_takes_each_row_once_and_training_has_each_class(
    drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "DRAWN", drawn)
    labels = [number % 7 if number % 400 else 7 + number for number in range(ROWS)]
    classes = list(map(str, sorted({*labels})))
    options = TextOptions(data="x", eval_fraction=0.4)
    encode = partial(encode_labels, classes=classes)
    some, others = (
        dict(split_parts(rows, classes, encode, options, 3, read)) for rows in both(labels)
    )
    numbers = [part.numbers[np.arange(len(part.numbers))] for part in some.values()]
    assert sorted(np.concatenate(numbers).tolist()) == [*range(ROWS)]
    assert len(numbers[1]) == pytest.approx(0.4 * ROWS, abs=20)
    for part, rows in zip(some.values(), numbers, strict=True):
        assert [classes[number] for number in part.labels[:]] == [str(labels[row]) for row in rows]
    assert {*some["train"].labels[:].tolist()} == {*range(len(classes))}
    are_alike = all(
        np.array_equal(rows, np.asarray(part.numbers))
        for rows, part in zip(numbers, others.values(), strict=True)
    )
    assert are_alike is (drawn == ROWS)


def test_a_row_takes_a_bit_and_its_label_is_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 100_000
    texts = [""] * rows
    monkeypatch.setattr(splits, "DRAWN", 1000)
    options = TextOptions(data="x", eval_fraction=0.001)
    tracemalloc.start()
    coder = LabelCoder()
    for number in range(rows):
        coder.add(number % 10)
    source = LabeledTexts("x", texts, coder.coded())
    classes = list(map(str, distinct_labels(source)))
    parts = dict(
        split_parts(source, classes, partial(encode_labels, classes=classes), options, 0, read)
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(parts["train"].numbers) > 0.99 * rows
    assert peak < 2 * rows
