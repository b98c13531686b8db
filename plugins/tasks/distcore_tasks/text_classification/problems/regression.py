"""One number per text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore import DataError, Direction
from distcore_data import describe_value
from distcore_tasks.shared.arrays import array_blocks
from distcore_tasks.shared.classification.labels import Labeled
from distcore_tasks.shared.classification.predictions import answer_lines
from distcore_tasks.shared.stored_arrays import Entries, StoredArray
from distcore_tasks.text_classification.problems.contract import Origins

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = float(np.finfo(np.float32).max)


class Regression:
    """Implements ``Problem``; encoded labels are numbers, fp32 ``(rows,)``."""

    are_numbers: ClassVar = True
    metrics: ClassVar[dict[str, Direction]] = {
        "loss": "min",
        "pearson": "max",
        "spearman": "max",
        "rmse": "min",
    }

    def from_csv(self, labels: list[Any]) -> list[Any]:
        """Convert strings to numbers if possible, because CSV has no types."""
        return [_number(label) for label in labels]

    def label_problems(self, labels: Sequence[object]) -> Iterator[str | None]:
        """Require finite numbers."""
        for label in labels:
            if label == "":
                yield "label is empty: fill it in or remove the row"
            elif isinstance(label, bool) or not isinstance(label, int | float):
                yield f"label is {describe_value(label)}, expected a number"
            elif abs(label) <= LARGEST:
                yield None
            else:
                # Also what is not a number, which no comparison holds for.
                yield f"label is {label!r}, expected a finite number of fp32"

    def classes(self, rows: Labeled) -> list[int] | list[str]:
        """Return an empty list. Raises DataError if all rows have the same number."""
        numbers = self.encode(rows, ())
        first = numbers[:1]
        if all((block == first).all() for block in array_blocks(numbers)):
            problem = f"all {len(rows)} rows have the label {first[0]:g}: there is nothing to learn"
            raise DataError(f"{rows.name}: {problem}")
        return []

    def encode(self, rows: Labeled, classes: Sequence[str]) -> Entries:
        """Return the numbers, fp32 ``(rows,)``."""
        if isinstance(rows.labels, StoredArray):
            return rows.labels
        return np.asarray(rows.labels, np.float32)

    def facts(self, labels: Entries) -> dict[str, object]:
        """Return mean and standard deviation of the labels."""
        total = sum(float(block.sum(dtype=np.float64)) for block in array_blocks(labels))
        mean = total / len(labels)
        squares = 0.0
        for block in array_blocks(labels):
            # In fp64: large labels that differ little would have no deviation.
            deviations = block - np.float64(mean)
            squares += float(np.square(deviations).sum())
        return {"mean_label": mean, "std_label": round(math.sqrt(squares / len(labels)), 4)}

    def warnings(
        self, rows: Labeled, evaluation: Entries, classes: Sequence[str], held_out: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield nothing: numbers have no warnings."""
        yield from ()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error."""
        return (logits[:, 0] - labels).square().sum()

    def outputs(self, logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """Return ``prediction``, with labels also ``loss`` and ``label``, all fp32 ``(n,)``."""
        prediction = logits[:, 0]
        if labels is None:
            return {"prediction": prediction}
        loss = (prediction - labels).square()
        return {"loss": loss, "label": labels, "prediction": prediction}

    def report(
        self, outputs: Mapping[str, Tensor], classes: Sequence[str], trained: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return ``loss``, the mean squared error, its root ``rmse``, and the correlations.

        The correlations are ``None`` if all labels, or all predictions, are equal.
        ``baseline_loss`` is the loss of always predicting the mean of the training rows.
        """
        if not len(outputs.get("label", ())):
            return dict.fromkeys((*self.metrics, "baseline_loss"))
        label = outputs["label"].double().cpu().numpy()
        prediction = outputs["prediction"].double().cpu().numpy()
        loss = outputs["loss"].double().mean().item()
        mean = trained.get("mean_label")
        baseline_loss = None
        if mean is not None:
            baseline_loss = float(np.square(label - mean).mean())
        return {
            "loss": loss,
            "rmse": math.sqrt(loss),
            **_correlations(label, prediction),
            "baseline_loss": baseline_loss,
        }

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield lines whose ``label`` and ``prediction`` are numbers, as precise as fp32."""

        def answer(index: int) -> dict[str, object]:
            line: dict[str, object] = {}
            for name in ("label", "prediction"):
                if name in outputs:
                    # Seven digits: the others are those of the conversion to fp64.
                    line[name] = float(f"{outputs[name][index].item():.7g}")
            return line

        return answer_lines(outputs, origins, answer)


def _number(text: str) -> object:
    """Return the number of a text, or the text, which ``label_problems`` then reports."""
    with suppress(ValueError):
        return float(text)
    return text


def _correlations(label: np.ndarray, prediction: np.ndarray) -> dict[str, object]:
    """Return Pearson's and Spearman's correlations; ``None`` for values that are all equal."""
    from scipy import stats

    if not (np.ptp(label) and np.ptp(prediction)):
        return {"pearson": None, "spearman": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        pearson = stats.pearsonr(label, prediction)
        spearman = stats.spearmanr(label, prediction)
    return {"pearson": float(pearson.statistic), "spearman": float(spearman.statistic)}
