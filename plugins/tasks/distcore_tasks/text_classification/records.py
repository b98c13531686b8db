"""Records of texts with a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distcore_data import Record
from distcore_tasks.shared.classification.labels import id_problem
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.text_classification.options import Columns


class LabeledText(NamedTuple):
    """What is read of a row."""

    texts: tuple[str, ...]
    """One text, or two; none of them blank, all valid Unicode."""
    label: object = None
    """The label as it was read; ``None`` for a row to predict."""
    id: int | str | None = None
    """The user's id of the row, if there is a column of ids."""


def labeled_text(names: Sequence[str], record: Record) -> LabeledText:
    """Return the value of a checked record. ``names``: those of its columns."""
    by_name = dict(zip(names, record, strict=True))
    texts = tuple(str(by_name[name]) for name in ("text", "text_pair") if name in by_name)
    row_id = by_name.get("id")
    assert row_id is None or isinstance(row_id, int | str)
    return LabeledText(texts, by_name.get("label"), row_id)


def schema_of(columns: Columns) -> Schema[LabeledText]:
    """Return what is read of a row. Labels are checked when all are known."""
    names = columns_of(columns)
    return Schema(
        columns.settings(),
        lambda record: record_problem(names, record),
        lambda record: labeled_text(names, record),
    )


def columns_of(columns: Columns, labeled: bool = True) -> list[str]:
    """Return the columns of a record, in order: some of ``text``,
    ``text_pair``, ``label`` and ``id``.
    """
    return [setting.rpartition(".")[2] for setting in columns.settings(labeled)]


def record_problem(names: Sequence[str], record: Record) -> str | None:
    """Return the error in a record's texts or id, ``None`` for a valid record. ``names``:
    those of its columns.
    """
    # a pass over all rows spends much of its time here
    for name, value in zip(names, record, strict=True):
        if name in ("text", "text_pair"):
            problem = text_problem(value, name)
        else:
            problem = id_problem([value]) if name == "id" else None
        if problem:
            return problem
    return None
