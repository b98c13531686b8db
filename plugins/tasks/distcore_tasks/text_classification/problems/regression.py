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
            else:
                yield (
                    None
                    if abs(label) <= LARGEST
                    else f"label is {label!r}, expected a finite number of fp32"
                )

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
        return (
            rows.labels
            if isinstance(rows.labels, StoredArray)
            else np.asarray(rows.labels, np.float32)
        )

    def facts(self, labels: Entries) -> dict[str, object]:
        """Return mean and standard deviation of the labels."""
        mean = sum(float(block.sum(dtype=np.float64)) for block in array_blocks(labels)) / len(
            labels
        )
        squares = sum(
            float(np.square(block - np.float64(mean)).sum()) for block in array_blocks(labels)
        )
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
        outputs = {"prediction": prediction}
        return (
            outputs
            if labels is None
            else {"loss": (prediction - labels).square(), "label": labels} | outputs
        )

    def report(
        self, outputs: Mapping[str, Tensor], classes: Sequence[str], trained: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return ``loss``, the mean squared error, its root ``rmse``, and the correlations
        of prediction and label.

        The correlations are ``None`` if all labels, or all predictions, are equal.
        ``baseline_loss`` is the loss of always predicting the mean of the training rows.
        """
        if not len(outputs.get("label", ())):
            return dict.fromkeys((*self.metrics, "baseline_loss"))
        label, prediction = (
            outputs[name].double().cpu().numpy() for name in ("label", "prediction")
        )
        loss = outputs["loss"].double().mean().item()
        mean = trained.get("mean_label")
        return {
            "loss": loss,
            "rmse": math.sqrt(loss),
            **_correlations(label, prediction),
            "baseline_loss": None if mean is None else float(np.square(label - mean).mean()),
        }

    def lines(
        self, outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Origins
    ) -> Iterator[dict[str, object]]:
        """Yield lines whose ``label`` and ``prediction`` are numbers of seven digits,
        the precision of fp32.
        """
        names = [name for name in ("label", "prediction") if name in outputs]
        return answer_lines(
            outputs,
            origins,
            lambda index: {name: float(f"{outputs[name][index].item():.7g}") for name in names},
        )


def _number(text: str) -> object:
    with suppress(ValueError):
        return float(text)
    return text


def _correlations(label: np.ndarray, prediction: np.ndarray) -> dict[str, object]:
    from scipy import stats

    if not (np.ptp(label) and np.ptp(prediction)):
        return {"pearson": None, "spearman": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        correlations = {
            "pearson": stats.pearsonr(label, prediction),
            "spearman": stats.spearmanr(label, prediction),
        }
    return {name: float(result.statistic) for name, result in correlations.items()}
