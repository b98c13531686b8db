"""The predictions of a task: lines about tested rows, and about rows without labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from distcore.errors import TaskError
from distcore.plugin.task.methods import TaskMethods
from distcore.plugin.task.outputs import row_lines, tested_lines
from distcore.plugin.task.task import Datasets, FileRows, Outputs

TRIED = 3
"""Lines of predictions that are tried before the first step."""


class TaskPredictions:
    """The lines that a task writes about rows; results are checked."""

    def __init__(self, methods: TaskMethods) -> None:
        self._methods = methods

    @property
    def are_written(self) -> bool:
        """True if the task writes a line for each row that was tested."""
        return self._methods.has("predictions")

    def lines(self, outputs: Outputs, data: Datasets) -> Iterator[str]:
        """Yield the lines of predictions.jsonl; TaskError for one that is not a JSON object."""
        return tested_lines(self._methods["predictions"](outputs, data))

    def try_lines(self, outputs: Outputs, data: Datasets) -> None:
        """Make the first lines of predictions.jsonl and forget them; TaskError as by ``lines``."""
        if self.are_written:
            for _ in islice(self.lines(outputs, data), TRIED):
                pass

    def check_without_labels(self, name: str = "") -> None:
        """Raise TaskError, with what is missing, unless the task predicts rows without labels.

        ``name`` is the task's name in the config: a user cannot add methods to an installed task.
        """
        needs = (
            ("row_columns", "open_rows"),
            ("unlabeled",),
            ("predictions",),
            ("outputs", "generate"),
        )
        missing = []
        for either in needs:
            if not any(map(self._methods.has, either)):
                missing.append(f"{either[0]}()")
        if not missing:
            return
        lacks = f"does not predict rows without labels, because it lacks {', '.join(missing)}"
        if name and ":" not in name:
            raise TaskError(
                f"task {name}: {lacks}; distcore eval measures it on rows that have labels"
            )
        raise TaskError(
            f"task {self._methods.name}: {lacks}: add them; docs/predictions.md has an example"
        )

    def row_columns(self) -> Mapping[str, str]:
        """Return the columns of a file with rows to predict, by the option that names each."""
        return self._methods.call("row_columns", {})

    def open_rows(
        self, source: Path, others: Mapping[str, str]
    ) -> Iterator[tuple[object, ...]] | None:
        """Yield the records of a file or folder; ``None`` if the core reads ``row_columns``."""
        return self._methods.call("open_rows", None, source, others)

    def unlabeled(self, rows: FileRows, data: Datasets) -> Datasets:
        """Return ``data`` with ``rows`` as its test rows; DataError for a row that is refused."""
        dataset = self._methods["unlabeled"](rows, data)
        if not hasattr(type(dataset), "batch") or len(dataset) != len(rows.records):
            answer = type(dataset).__name__
            if hasattr(dataset, "__len__"):
                answer = f"{len(dataset)} rows"
            raise TaskError(
                f"task: unlabeled() returned {answer}; expected a dataset of {len(rows.records)}"
                " rows"
            )
        return replace(data, test=dataset)

    def unlabeled_lines(self, outputs: Outputs, data: Datasets, rows: FileRows) -> list[str]:
        """Return one line of predictions for each of ``rows``; ``data`` comes from ``unlabeled``.

        Raises TaskError for a line that is not a JSON object, or too many or too few of them.
        """
        return row_lines(self._methods["predictions"](outputs, data), rows)
