"""Precision, recall and F1 of each class, and their table, for rows with one class each.

Figures and table equal those of scikit-learn, whose import takes longer than a run's first steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HEADER = ("precision", "recall", "f1-score", "support")


@dataclass(frozen=True, slots=True, eq=False)
class ClassScores:
    """Scores of each class, float64 ``(classes,)``; 0 if the divisor is 0."""

    precision: Tensor
    """Share of the rows predicted as the class that belong to it."""
    recall: Tensor
    """Share of the rows of the class that are predicted as it."""
    f1: Tensor
    """Harmonic mean of precision and recall."""
    support: Tensor
    """Rows of each class, int64 ``(classes,)``."""
    accuracy: float
    """Share of rows with a correct prediction."""

    def table(self, classes: Sequence[str]) -> str:
        """Return a line for each class, the accuracy, and the means over classes and over rows."""
        rows = int(self.support.sum())
        width = max(map(len, (*classes, "accuracy", "macro avg", "weighted avg")))
        columns = (self.precision, self.recall, self.f1)

        lines = [" " * width + " " + "".join(f" {name:>9}" for name in HEADER), ""]
        scores_of_classes = zip(*(column.tolist() for column in columns), strict=True)
        supports = self.support.tolist()
        for name, scores, support in zip(classes, scores_of_classes, supports, strict=True):
            lines.append(_line(name, scores, support, width))
        lines.append("")

        lines.append(f"{'accuracy':>{width}}  {'':>9} {'':>9} {self.accuracy:>9.4f} {rows:>9}")
        plain_means = [column.mean().item() for column in columns]
        lines.append(_line("macro avg", plain_means, rows, width))
        weights = self.support.double()
        weighted_means = [(column @ weights).item() / max(1, rows) for column in columns]
        lines.append(_line("weighted avg", weighted_means, rows, width))
        return "\n".join([*lines, ""])


def class_scores(label: Tensor, prediction: Tensor, classes: int) -> ClassScores:
    """Return the scores of all ``classes``.

    ``label`` and ``prediction`` are class numbers, int64 ``(rows,)``.
    """
    hits = label[label == prediction].bincount(minlength=classes).double()
    support = label.bincount(minlength=classes)
    predicted = prediction.bincount(minlength=classes)
    return ClassScores(
        precision=hits / predicted.clamp(min=1),
        recall=hits / support.clamp(min=1),
        f1=2 * hits / (support + predicted).clamp(min=1),
        support=support,
        accuracy=(hits.sum() / max(1, len(label))).item(),
    )


def _line(name: str, scores: Sequence[float], support: int, width: int) -> str:
    """Return a line of the table; ``width`` is that of its first column."""
    columns = " ".join(f"{score:>9.4f}" for score in scores)
    return f"{name:>{width}}  {columns} {support:>9}"
