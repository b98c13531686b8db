"""Labelled texts: the rows of a text-classification data set, checked one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore.data.files import read_records, row_error
from distcore.errors import DataError
from distcore.tasks.class_checks import is_integer
from distcore.tasks.classes import id_problem, label_problem, row_places
from distcore.tasks.sources import text_problem
from distcore.tasks.text_classification.options import Columns


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts and their labels, in file order."""

    name: str
    """What error messages call these rows, such as ``data file reviews.csv``."""
    texts: list[str]
    """Not blank, and valid Unicode."""
    labels: list[int] | list[str]
    """One per text: all integers from 0, or all strings."""
    ids: list[int | str] | None = None
    """One per text: what the user calls the row. ``None`` where no column says it."""

    def __len__(self) -> int:
        return len(self.texts)

    def places(self, rows: Sequence[int]) -> str:
        """Return ``row 3``, ``rows 3 and 7``: counted from 1, while ``rows`` count from 0."""
        return row_places(rows)


def read_rows(path: Path, columns: Columns) -> Rows:
    """Read a data file with one text and one label per row and, if a column is named for it, one id.

    Raises DataError: the file, the row (counted from 1, without a header), what was found and what to do.
    """
    ids = {"columns.id": columns.id} if columns.id else {}
    records = read_records(path, {"columns.text": columns.text, "columns.label": columns.label} | ids)
    if path.suffix.lower() == ".csv":
        records = iter(_with_integer_labels(list(records)))
    return check_rows(f"data file {path}", records)


def check_rows(name: str, records: Iterable[tuple[object, ...]]) -> Rows:
    """Check (text, label) or (text, label, id) records; ``name`` opens every message. Raises DataError."""
    texts: list[str] = []
    labels: list[Any] = []
    ids: list[Any] = []
    for number, (text, label, *named) in enumerate(records, 1):
        problem = text_problem(text) or label_problem(label, labels[0] if labels else label) or id_problem(named)
        if problem is not None:
            raise row_error(name, number, problem)
        texts.append(str(text))
        labels.append(label)
        ids += named
    if not texts:
        raise DataError(f"{name}: holds no rows")
    return Rows(name, texts, labels, ids or None)


def _with_integer_labels(records: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """CSV has no types: its labels become integers if every one of them is written as an integer."""
    if all(is_integer(label) for _, label, *_ in records):
        return [(text, int(str(label)), *named) for text, label, *named in records]
    return records
