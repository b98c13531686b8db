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

    metrics: ClassVar[dict[str, Direction]] = {
        "loss": "min",
        "micro_f1": "max",
        "macro_f1": "max",
        "subset_accuracy": "max",
    }

    def from_csv(self, labels: list[Any]) -> list[Any]:
        """Return the labels unchanged. CSV has no lists, and the separator in a string
        would be a guess.
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
            problems = (
                label_problem(one, one if first is None else first, "an earlier one is")
                for one in some
            )
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
        """Return the share of rows with the most frequent set of labels, and the mean number of
        labels of a row.
        """
        sets, rows = distinct_targets(labels)
        return {
            "majority_share": round(_largest_share(sets, rows), 4),
            "mean_labels": round(float(sets.sum(axis=1) @ rows) / len(labels), 2),
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
        """Return ``prediction``, 1 for each class with a probability above
        0.5, uint8 ``(n, classes)``.

        ``scored`` and ``scores`` are as in ``class_outputs``; ``label`` has
        the form of ``prediction``.
        """
        import torch

        outputs = {"prediction": (logits > 0).to(torch.uint8)} | best_scored(
            logits, logits.sigmoid()
        )
        return (
            outputs
            if labels is None
            else {"loss": _row_losses(logits, labels), "label": labels} | outputs
        )

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

        label, prediction = outputs["label"], outputs["prediction"]
        both = label.cpu().numpy(), prediction.cpu().numpy()
        return {
            "loss": outputs["loss"].double().mean().item(),
            "micro_f1": float(metrics.f1_score(*both, average="micro", zero_division=0)),
            "macro_f1": float(metrics.f1_score(*both, average="macro", zero_division=0)),
            "subset_accuracy": (label == prediction).all(dim=1).sum().item() / rows,
            "majority_accuracy": _largest_share(label.cpu().numpy(), np.ones(rows)),
            "classification_report": metrics.classification_report(
                *both, target_names=list(classes), digits=4, zero_division=0
            ),
        }

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield lines whose ``label`` and ``prediction`` are lists; ``scores``
        are as in ``class_lines``.
        """

        def answer(index: int) -> dict[str, object]:
            names = [name for name in ("label", "prediction") if name in outputs]
            lists = {
                name: [labels[number] for number in outputs[name][index].nonzero()[:, 0]]
                for name in names
            }
            return {**lists, "scores": scores_of(outputs, index, labels)}

        return answer_lines(outputs, origins, answer)


def _row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import binary_cross_entropy_with_logits

    return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(
        dim=1
    )


def _largest_share(sets: np.ndarray, rows: np.ndarray) -> float:
    """Return the share of the most frequent of some sets of labels, each with
    its number of ``rows``.
    """
    _, places = np.unique(sets, axis=0, return_inverse=True)
    return float(np.bincount(places.reshape(-1), rows).max() / rows.sum())


def _duplicate(labels: list[Any]) -> str | None:
    """Return the error message for a row with a repeated label; ``None`` without one."""
    twice = next((label for place, label in enumerate(labels) if label in labels[:place]), None)
    return None if twice is None else f"label {twice!r} is repeated in the list"
