"""From a task's outputs to lines of predictions: of test rows, and of rows that have no labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from torch import Tensor

from distcore.errors import TaskError
from distcore.plugin.task.calls import checked_json
from distcore.plugin.task.optional import Generates, HasOutputs, OpensRows, Predicts, PredictsRows, ReadsRows
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import Datasets, FileRows, Task

Outputs = dict[str, Tensor | Ragged]
FIRST = 3
"""Lines of predictions that are tried before the first step."""


def prediction_lines(task: Predicts, outputs: Outputs, data: Datasets) -> Iterator[str]:
    """Yield the lines of predictions.jsonl; raises TaskError for one that is not a JSON object."""
    return map(_line, _objects(task, outputs, data))


def try_predictions(task: Task, outputs: Outputs, data: Datasets) -> None:
    """Make the first lines of predictions.jsonl and forget them; raises TaskError as ``prediction_lines`` does."""
    if isinstance(task, Predicts):
        for _ in islice(prediction_lines(task, outputs, data), FIRST):
            pass


def check_reads_rows(task: Task, name: str = "") -> None:
    """Raise TaskError, which says what is missing, unless the task can predict rows without labels.

    ``name`` is the config's: what an installed task lacks, a user cannot write.
    """
    wanted = {"row_columns() and unlabelled()": ReadsRows | OpensRows, "predictions()": Predicts}
    missing = [methods for methods, kind in wanted.items() if not isinstance(task, kind)]
    if not isinstance(task, HasOutputs | Generates):
        missing.append("outputs()")
    if not missing:
        return
    lacks = f"does not predict rows without labels, because it lacks {', '.join(missing)}"
    if name and ":" not in name:
        raise TaskError(f"task {name}: {lacks}; distcore eval measures it on rows that have labels")
    raise TaskError(f"task {type(task).__name__}: {lacks}: add them; docs/predictions.md has an example")


def unlabelled(task: PredictsRows, rows: FileRows, data: Datasets) -> Datasets:
    """Return ``data`` with ``rows`` as its test rows; raises DataError for a row that the task refuses."""
    dataset = task.unlabelled(rows, data)
    if not hasattr(type(dataset), "batch") or len(dataset) != len(rows.records):
        found = f"{len(dataset)} rows" if hasattr(dataset, "__len__") else type(dataset).__name__
        raise TaskError(f"task: unlabelled() returned {found}; expected a data set of {len(rows.records)} rows")
    return replace(data, test=dataset)


def unlabelled_lines(task: Predicts, outputs: Outputs, data: Datasets, rows: FileRows) -> list[str]:
    """Return one line of predictions for each of ``rows``; raises TaskError for other lines, or too many or few.

    ``data`` comes from ``unlabelled``. A line begins with file, row and id, if there is one, and has no index, which
    counts test rows. What the task itself calls ``file`` takes the place of file and row.
    """
    found = list(_objects(task, outputs, data))
    if len(found) != len(rows.records):
        raise TaskError(f"task: predictions() gave {len(found)} lines for {len(rows.records)} rows")
    lines = []
    for place, line in enumerate(found):
        line.pop("index", None)
        where = {} if "file" in line else {"file": rows.file, "row": rows.start + place}
        named = {} if rows.ids is None else {"id": rows.ids[place]}
        lines.append(_line(where | named | line))
    return lines


def _objects(task: Predicts, outputs: Outputs, data: Datasets) -> Iterator[dict[str, object]]:
    for line in task.predictions(outputs, data):
        if not isinstance(line, dict):
            raise TaskError(f"task: predictions() gave {type(line).__name__} as a line; expected a dict")
        yield line


def _line(values: dict[str, object]) -> str:
    return checked_json("predictions() gave a line that is not JSON", values) + "\n"
