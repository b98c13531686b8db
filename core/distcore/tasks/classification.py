"""What tasks with one class per row have in common: their metrics, and the labels that are kept with a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LABELS = "labels.json"
"""File with the labels in the order of class numbers, as the data file writes them."""
SCORED = 20
"""Most classes of a row whose scores are kept, so that an evaluation of very many classes fits into memory."""


def class_outputs(logits: Tensor, label: Tensor | None) -> dict[str, Tensor]:
    """Return ``prediction`` (int64) of each row, shape ``(n,)``, and its most probable classes.

    These are ``scored``, class numbers (int64) in ascending order, and ``scores``, their probabilities (fp32), both
    ``(n, k)``. With labels there are ``loss`` (fp32) and ``label`` (int64), too, shape ``(n,)``. ``logits``: fp32
    ``(n, classes)``. ``label``: int64 ``(n,)``.
    """
    from torch.nn.functional import cross_entropy

    # Not by score: classes that are almost alike would change places with the rows that share a forward pass.
    scored = logits.topk(min(SCORED, logits.shape[-1])).indices.sort(dim=-1).values
    scores = logits.softmax(dim=-1).gather(-1, scored)
    found = {"prediction": logits.argmax(dim=-1), "scores": scores, "scored": scored}
    if label is None:
        return found
    return {"loss": cross_entropy(logits, label, reduction="none"), "label": label} | found


def class_lines(
    outputs: Mapping[str, Tensor], labels: Sequence[int | str], origins: Iterable[Mapping[str, object]]
) -> Iterator[dict[str, object]]:
    """Yield for each row, in order: its index, where it came from, its label if it has one, prediction and scores.

    ``labels`` are those of the classes, as the data file writes them, ``origins`` one per row. ``scores`` have the
    probability of each class, at most ``SCORED``, the most probable first.
    """
    predicted = outputs["prediction"].tolist() if outputs else []
    for index, (prediction, origin) in enumerate(zip(predicted, origins, strict=False)):
        label = {"label": labels[int(outputs["label"][index])]} if "label" in outputs else {}
        scores = zip(outputs["scored"][index].tolist(), outputs["scores"][index].tolist(), strict=True)
        best_first = sorted(scores, key=lambda scored: -scored[1])
        yield {
            "index": index,
            **origin,
            **label,
            "prediction": labels[prediction],
            "scores": {str(labels[number]): round(score, 6) for number, score in best_first},
        }


def class_metrics(outputs: Mapping[str, Tensor], classes: Sequence[str]) -> dict[str, object]:
    """Return ``loss``, ``accuracy``, ``majority_accuracy`` and scikit-learn's ``classification_report``.

    ``loss`` is the mean over rows. ``majority_accuracy`` is the accuracy of always predicting the most frequent label
    of these rows. All four are ``None`` if there are no rows.
    """
    rows = len(outputs.get("label", ()))
    if not rows:
        return dict.fromkeys(("loss", "accuracy", "majority_accuracy", "classification_report"))
    label, prediction = outputs["label"], outputs["prediction"]
    return {
        "loss": outputs["loss"].double().mean().item(),
        "accuracy": (label == prediction).sum().item() / rows,
        "majority_accuracy": label.bincount().max().item() / rows,
        "classification_report": _classification_report(label, prediction, classes),
    }


def write_labels(folder: Path, labels: Sequence[int | str]) -> None:
    """Write ``LABELS`` into ``folder``."""
    text = json.dumps(list(labels), ensure_ascii=False, indent=2)
    (folder / LABELS).write_text(text + "\n", encoding="utf-8")


def read_labels(folder: Path) -> tuple[int | str, ...] | None:
    """Return what ``write_labels`` wrote; ``None`` if it did not."""
    file = folder / LABELS
    return tuple(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _classification_report(label: Tensor, prediction: Tensor, classes: Sequence[str]) -> str:
    from sklearn.metrics import classification_report

    text: str = classification_report(
        label.cpu().numpy(),
        prediction.cpu().numpy(),
        labels=range(len(classes)),
        target_names=list(classes),
        digits=4,
        zero_division=0,
    )
    return text
