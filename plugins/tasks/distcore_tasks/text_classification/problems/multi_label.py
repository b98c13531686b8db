"""Any number of classes per text, including none: each class is a binary decision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore import Direction
from distcore_data import describe_value
from distcore_tasks.shared.arrays import array_blocks
from distcore_tasks.shared.classification.checks import check_classes
from distcore_tasks.shared.classification.coded import CodedLabels, CodedTargets, distinct_targets
from distcore_tasks.shared.classification.labels import (
    Labeled,
    class_numbers,
    distinct_labels,
    label_problem,
)
from distcore_tasks.shared.classification.predictions import answer_lines, best_scored, scores_of
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.text_classification.problems.contract import Origins

if TYPE_CHECKING:
    from torch import Tensor


class MultiLabel:
    """Implements ``Problem``. An encoded label is 1 for a class that applies, else
    0; uint8 ``(rows, classes)``.
    """

    are_numbers: ClassVar = False
    metrics: ClassVar[dict[str, Direction]] = {
        "loss": "min",
        "micro_f1": "max",
        "macro_f1": "max",
        "subset_accuracy": "max",
    }

    def from_csv(self, labels: list[Any]) -> list[Any]:
        """Return the labels unchanged.

        CSV has no lists, and the separator in a string would be a guess.
        """
        return labels

    def label_problems(self, labels: Sequence[object]) -> Iterator[str | None]:
        """Require lists of distinct integers from 0 or distinct strings, all of
        the first label's type.
        """
        every = (one for some in labels if isinstance(some, list) for one in some)
        first = next((one for one in every if not label_problem(one, one)), None)
        for some in labels:
            if not isinstance(some, list):
                expected = "expected a list of labels, as JSON, JSON Lines and Parquet have them"
                yield f"label is {describe_value(some)}, {expected}"
                continue
            problems = []
            for label in some:
                # Without a good label before, each is compared with itself alone.
                other = label if first is None else first
                problems.append(label_problem(label, other, "an earlier one is"))
            yield next(filter(None, problems), _duplicate(some))

    def classes(self, rows: Labeled) -> list[int] | list[str]:
        """Return the distinct labels, sorted."""
        return distinct_labels(rows)

    def encode(self, rows: Labeled, classes: Sequence[str]) -> Entries:
        """Return 1 for each class of each row, uint8 ``(rows, classes)``."""
        if isinstance(rows.labels, CodedLabels):
            return CodedTargets(rows.labels.codes, rows.labels.sets(classes))
        table = np.zeros((len(rows), len(classes)), np.uint8)
        for row, number in class_numbers(rows, classes):
            table[row, number] = 1
        return table

    def facts(self, labels: Entries) -> dict[str, object]:
        """Return the share of the most frequent set of labels, and the mean number of labels."""
        sets, rows = distinct_targets(labels)
        labels_in_sets = sets.sum(axis=1)
        labels_in_rows = float(labels_in_sets @ rows)
        return {
            "majority_share": round(_largest_share(sets, rows), 4),
            "mean_labels": round(labels_in_rows / len(labels), 2),
        }

    def warnings(
        self, rows: Labeled, evaluation: Entries, classes: Sequence[str], held_out: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield the warnings of ``check_classes``."""
        counts = np.zeros(len(classes), np.int64)
        for block in array_blocks(evaluation):
            counts += block.sum(axis=0, dtype=np.int64)
        return check_classes(rows, counts, classes, held_out)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross entropy; each row is a mean over classes, as in transformers."""
        return _row_losses(logits, labels).sum()

    def outputs(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """Return ``prediction``, uint8 ``(n, classes)``: 1 for a probability above 0.5.

        ``scored`` and ``scores`` are as in ``class_outputs``; ``label`` has the form of
        ``prediction``.
        """
        import torch

        outputs = {}
        if labels is not None:
            outputs["loss"] = _row_losses(logits, labels)
            outputs["label"] = labels
        outputs["prediction"] = (logits > 0).to(torch.uint8)
        return outputs | best_scored(logits, logits.sigmoid())

    def report(
        self, outputs: Mapping[str, Tensor], classes: Sequence[str], trained: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the ``metrics``, ``majority_accuracy`` and ``classification_report``.

        ``subset_accuracy`` is the share of rows with all classes correct. ``majority_accuracy`` is
        the subset accuracy of always predicting the most frequent set of labels in these rows.
        """
        rows = len(outputs.get("label", ()))
        if not rows:
            return dict.fromkeys((*self.metrics, "majority_accuracy", "classification_report"))
        from sklearn import metrics

        label = outputs["label"].cpu().numpy()
        prediction = outputs["prediction"].cpu().numpy()
        right_rows = int((label == prediction).all(axis=1).sum())
        micro_f1 = metrics.f1_score(label, prediction, average="micro", zero_division=0)
        macro_f1 = metrics.f1_score(label, prediction, average="macro", zero_division=0)
        table = metrics.classification_report(
            label, prediction, target_names=list(classes), digits=4, zero_division=0
        )
        return {
            "loss": outputs["loss"].double().mean().item(),
            "micro_f1": float(micro_f1),
            "macro_f1": float(macro_f1),
            "subset_accuracy": right_rows / rows,
            "majority_accuracy": _largest_share(label, np.ones(rows)),
            "classification_report": table,
        }

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield lines whose ``label`` and ``prediction`` are lists, with ``scores``."""

        def answer(index: int) -> dict[str, object]:
            line: dict[str, object] = {}
            for name in ("label", "prediction"):
                if name in outputs:
                    numbers = outputs[name][index].nonzero()[:, 0]
                    line[name] = [labels[number] for number in numbers]
            line["scores"] = scores_of(outputs, index, labels)
            return line

        return answer_lines(outputs, origins, answer)


def _row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row, ``(n,)``: the mean over classes."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    targets = labels.to(logits.dtype)
    losses = binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.mean(dim=1)


def _largest_share(sets: np.ndarray, rows: np.ndarray) -> float:
    """Return the share of the most frequent set of labels; ``rows``: those with each set."""
    _, number_of_set = np.unique(sets, axis=0, return_inverse=True)
    # Flat: some releases of numpy return a column.
    rows_by_set = np.bincount(number_of_set.reshape(-1), rows)
    return float(rows_by_set.max() / rows.sum())


def _duplicate(labels: list[Any]) -> str | None:
    """Return the error message for a row with a repeated label; ``None`` without one."""
    for index, label in enumerate(labels):
        if label in labels[:index]:
            return f"label {label!r} is repeated in the list"
    return None
