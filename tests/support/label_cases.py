"""Rows with labels: in memory, of a file, and of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import row_error, skipping
from distcore_tasks.rows.labels import LABELS, LabeledValues, open_labeled
from distcore_tasks.rows.origins import SOURCE_ROW
from distcore_tasks.shared.classification.labels import row_places
from distcore_tasks.text_classification.options import Columns, TextOptions
from distcore_tasks.text_classification.rows import LabeledRows

COLUMNS = Columns()


@dataclass(frozen=True)
class LabeledTexts:
    """Texts in memory with their labels."""

    name: str
    texts: Sequence[str]
    labels: Any

    def __len__(self) -> int:
        return len(self.texts)

    def places(self, rows: Sequence[int]) -> str:
        return row_places(rows)

    def problem(self, row: int, what: str) -> DataError:
        return row_error(self.name, row + 1, what)


def read_labeled(
    file: Path,
    columns: Columns = COLUMNS,
    *,
    most_bad_rows: int = 0,
    **given: Any,
) -> LabeledValues:
    """The rows of a file with their labels."""
    options = TextOptions(data=str(file), columns=columns, skip_bad_rows=most_bad_rows, **given)
    bad_rows: AbstractContextManager[Any] = nullcontext()
    if most_bad_rows:
        bad_rows = skipping(most_bad_rows)
    with bad_rows:
        return open_labeled(str(file), LabeledRows(options), options.problem)


def texts_of(rows: LabeledValues) -> list[str]:
    """The first text of each row."""
    return [value.texts[0] for value in rows.values]


def labels_of(dataset: Any) -> np.ndarray:
    """The encoded label of each stored row."""
    labels: np.ndarray = dataset.table.all()[LABELS]
    return labels


def source_rows(dataset: Any) -> np.ndarray:
    """The number of each stored row in its source, from 0."""
    numbers: np.ndarray = dataset.table.all()[SOURCE_ROW]
    return numbers
