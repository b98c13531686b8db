"""One class per text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from distcore_tasks.shared.arrays import count_numbers
from distcore_tasks.shared.classification.checks import check_classes, is_header, is_integer
from distcore_tasks.shared.classification.labels import (
    Labeled,
    distinct_labels,
    each_label,
    encode_labels,
    is_null,
    label_problem,
)
from distcore_tasks.shared.classification.predictions import (
    METRICS,
    class_lines,
    class_metrics,
    class_outputs,
)
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.text_classification.problems.contract import Origins

if TYPE_CHECKING:
    from torch import Tensor


NUMBERS = "; for numbers that are no classes: --problem-type regression"
"""What to do with labels that are no classes."""
NULLS = (
    "; labels of other rows are missing (null), which turns a column of integers into floats: fill"
    " them in or remove their rows, and save the others as integers"
)
"""What to do with floats beside a null."""


class SingleLabel:
    """Implements ``Problem``; encoded labels are class numbers, int64."""

    are_numbers: ClassVar = False
    metrics: ClassVar = METRICS

    def from_csv(self, labels: list[Any]) -> list[Any]:
        """Convert labels to integers if all of them are integers, because CSV has no types."""
        return [int(label) for label in labels] if all(map(is_integer, labels)) else labels

    def label_problems(self, labels: Sequence[object]) -> Iterator[str | None]:
        """Require integers from 0 or strings, all of the first label's type."""
        first = next((label for label in labels if not label_problem(label, label)), None)
        where = "row 1 has" if labels and first is labels[0] else "an earlier one is"
        remedy_of_floats = NULLS if any(map(is_null, labels)) else NUMBERS
        for label in labels:
            problem = label_problem(label, label if first is None else first, where)
            is_other_float = isinstance(label, float) and not is_null(label)
            yield f"{problem}{remedy_of_floats}" if problem and is_other_float else problem

    def classes(self, rows: Labeled) -> list[int] | list[str]:
        """Return the distinct labels, sorted.

        Raises DataError where each row has a number of its own.
        """
        distinct = distinct_labels(rows)
        if is_header(rows):
            name = next(each_label(rows))[1]
            what = (
                f"label {name!r} is no number, as all others are; remove the row if it is a second"
                " header"
            )
            raise rows.problem(0, f"{what}, or correct it")
        if len(distinct) == len(rows) > 1 and all(map(_is_fraction, distinct)):
            raise rows.problem(
                0, f"label {distinct[0]} is a number, and each row has another{NUMBERS}"
            )
        return distinct

    def encode(self, rows: Labeled, classes: Sequence[str]) -> Entries:
        """Return the result of ``encode_labels``."""
        return encode_labels(rows, classes)

    def facts(self, labels: Entries) -> dict[str, object]:
        """Return the share of the most frequent class."""
        return {"majority_share": round(float(count_numbers(labels).max() / len(labels)), 4)}

    def warnings(
        self, rows: Labeled, evaluation: Entries, classes: Sequence[str], held_out: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield the warnings of ``check_classes``."""
        return check_classes(rows, count_numbers(evaluation, len(classes)), classes, held_out)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(logits, labels, reduction="sum")

    def outputs(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """Return the result of ``class_outputs``."""
        return class_outputs(logits, labels)

    def report(
        self, outputs: Mapping[str, Tensor], classes: Sequence[str], trained: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the result of ``class_metrics``."""
        return class_metrics(outputs, classes)

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield the lines of ``class_lines``."""
        return class_lines(outputs, labels, origins)


def _is_fraction(label: int | str) -> bool:
    """Return True for the text of a number with a point, as a CSV has it."""
    return (
        isinstance(label, str)
        and re.fullmatch(r"[+-]?\d*\.\d+([eE][+-]?\d+)?", label.strip()) is not None
    )
