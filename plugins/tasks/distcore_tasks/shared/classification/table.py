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
        """Return a line for each class, then accuracy, the plain mean over classes, and the
        mean weighted by rows.
        """
        rows, averages = int(self.support.sum()), ("accuracy", "macro avg", "weighted avg")
        width = max(map(len, (*classes, *averages)))
        scores = (self.precision, self.recall, self.f1)
        lines = [" " * width + " " + "".join(f" {name:>9}" for name in HEADER), ""]
        for name, *values, support in zip(
            classes, *(one.tolist() for one in scores), self.support.tolist(), strict=True
        ):
            lines.append(_line(name, values, support, width))
        lines += ["", f"{'accuracy':>{width}}  {'':>9} {'':>9} {self.accuracy:>9.4f} {rows:>9}"]
        lines.append(_line("macro avg", [one.mean().item() for one in scores], rows, width))
        weighted = [(one @ self.support.double()).item() / max(1, rows) for one in scores]
        return "\n".join([*lines, _line("weighted avg", weighted, rows, width), ""])


def class_scores(label: Tensor, prediction: Tensor, classes: int) -> ClassScores:
    """Return the scores of all ``classes``; ``label`` and ``prediction`` are
    class numbers, int64 ``(rows,)``.
    """
    hits = label[label == prediction].bincount(minlength=classes).double()
    support, predicted = label.bincount(minlength=classes), prediction.bincount(minlength=classes)
    return ClassScores(
        precision=hits / predicted.clamp(min=1),
        recall=hits / support.clamp(min=1),
        f1=2 * hits / (support + predicted).clamp(min=1),
        support=support,
        accuracy=(hits.sum() / max(1, len(label))).item(),
    )


def _line(name: str, scores: Sequence[float], support: int, width: int) -> str:
    return f"{name:>{width}}  " + " ".join(f"{score:>9.4f}" for score in scores) + f" {support:>9}"
