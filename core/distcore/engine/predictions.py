"""From a task's outputs to lines of predictions: of test rows, and of rows that have no labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from torch import Tensor

from distcore.engine.task_calls import checked_json
from distcore.errors import TaskError
from distcore.plugin.abilities import Generates, HasOutputs, Predicts, ReadsRows
from distcore.plugin.ragged import Ragged
from distcore.plugin.task import Datasets, FileRows, Task

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


def check_reads_rows(task: Task) -> None:
    """Raise TaskError, which says what is missing, unless the task can predict rows without labels."""
    wanted = {"row_columns() and unlabelled()": ReadsRows, "predictions()": Predicts}
    missing = [methods for methods, kind in wanted.items() if not isinstance(task, kind)]
    if not isinstance(task, HasOutputs | Generates):
        missing.append("outputs()")
    if missing:
        name = type(task).__name__
        raise TaskError(
            f"task {name}: cannot predict rows of a file, because it lacks {', '.join(missing)}: write them "
            "(ReadsRows and Predicts in distcore.plugin.abilities)"
        )


def unlabelled(task: ReadsRows, rows: FileRows, data: Datasets) -> Datasets:
    """Return ``data`` with ``rows`` as its test rows; raises DataError for a row that the task refuses."""
    dataset = task.unlabelled(rows, data)
    if not hasattr(type(dataset), "batch") or len(dataset) != len(rows.records):
        found = f"{len(dataset)} rows" if hasattr(dataset, "__len__") else type(dataset).__name__
        raise TaskError(f"task: unlabelled() returned {found}; expected a data set of {len(rows.records)} rows")
    return replace(data, test=dataset)


def unlabelled_lines(task: Predicts, outputs: Outputs, data: Datasets, rows: FileRows) -> list[str]:
    """Return one line of predictions for each of ``rows``; raises TaskError for other lines, or too many or few.

    ``data`` comes from ``unlabelled``. A line begins with file and row, and has no index, which counts test rows.
    """
    found = list(_objects(task, outputs, data))
    if len(found) != len(rows.records):
        raise TaskError(f"task: predictions() gave {len(found)} lines for {len(rows.records)} rows")
    for line in found:
        line.pop("index", None)
    return [_line({"file": rows.file, "row": number} | line) for number, line in enumerate(found, rows.start)]


def _objects(task: Predicts, outputs: Outputs, data: Datasets) -> Iterator[dict[str, object]]:
    for line in task.predictions(outputs, data):
        if not isinstance(line, dict):
            raise TaskError(f"task: predictions() gave {type(line).__name__} as a line; expected a dict")
        yield line


def _line(values: dict[str, object]) -> str:
    return checked_json("predictions() gave a line that is not JSON", values) + "\n"
