"""Metrics and predictions of classification tasks, and the file of labels in a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distcore import Direction
from distcore_tasks.shared.classification.table import class_scores

if TYPE_CHECKING:
    from torch import Tensor

METRICS: dict[str, Direction] = {"loss": "min", "accuracy": "max", "macro_f1": "max"}
"""Metrics of tasks with one class per row, with the better direction."""
LABELS = "labels.json"
"""File with the labels of the data file, in the order of class numbers."""
DIVERGED = 20.0
"""Mean cross entropy far above that of guessing at random among millions of classes."""
SCORED = 20
"""Maximum number of scores of a row, so that those of very many classes fit into memory."""


def class_outputs(logits: Tensor, label: Tensor | None) -> dict[str, Tensor]:
    """Return ``prediction`` (int64) of each row, shape ``(n,)``, and its most probable classes.

    ``scored`` are the class numbers (int64), ascending, and ``scores`` their probabilities
    (fp32), both ``(n, k)``. With labels there are also ``loss`` (fp32) and ``label`` (int64), shape
    ``(n,)``. ``logits``: fp32 ``(n, classes)``. ``label``: int64 ``(n,)``.
    """
    from torch.nn.functional import cross_entropy

    outputs = {}
    if label is not None:
        outputs["loss"] = cross_entropy(logits, label, reduction="none")
        outputs["label"] = label
    outputs["prediction"] = logits.argmax(dim=-1)
    return outputs | best_scored(logits, logits.softmax(dim=-1))


def best_scored(logits: Tensor, probabilities: Tensor) -> dict[str, Tensor]:
    """Return ``scored`` and ``scores`` of each row, as ``class_outputs`` does.

    Both arguments are ``(n, classes)``.
    """
    classes = logits.shape[-1]
    best = logits.topk(min(SCORED, classes)).indices
    # By number: the order by score of near-equal classes would vary with the rest of the batch.
    scored = best.sort(dim=-1).values
    return {"scored": scored, "scores": probabilities.gather(-1, scored)}


def class_lines(
    outputs: Mapping[str, Tensor],
    labels: Sequence[int | str],
    origins: Iterable[Mapping[str, object]],
) -> Iterator[dict[str, object]]:
    """Yield index, origin, label (if any), prediction and scores of each row, in order.

    ``labels`` name the classes in predictions, and ``origins`` has one entry per row. ``scores``
    has the probabilities of at most ``SCORED`` classes, the most probable first.
    """

    def answer(index: int) -> dict[str, object]:
        line: dict[str, object] = {}
        for name in ("label", "prediction"):
            if name in outputs:
                line[name] = labels[int(outputs[name][index])]
        line["scores"] = scores_of(outputs, index, labels)
        return line

    return answer_lines(outputs, origins, answer)


def answer_lines(
    outputs: Mapping[str, Tensor],
    origins: Iterable[Mapping[str, object]],
    answer: Callable[[int], dict[str, object]],
) -> Iterator[dict[str, object]]:
    """Yield index, origin and the result of ``answer`` for each row, in order."""
    rows = len(outputs["prediction"]) if outputs else 0
    for index, origin in zip(range(rows), origins, strict=False):
        yield {"index": index, **origin, **answer(index)}


def scores_of(
    outputs: Mapping[str, Tensor], index: int, labels: Sequence[int | str]
) -> dict[str, float]:
    """Return the ``scores`` of a row by label, the most probable first, to six digits."""
    classes = outputs["scored"][index].tolist()
    scores = outputs["scores"][index].tolist()
    # Stable: equal scores keep the order of class numbers.
    best_first = sorted(zip(classes, scores, strict=True), key=lambda scored: -scored[1])
    return {str(labels[number]): round(score, 6) for number, score in best_first}


def class_metrics(outputs: Mapping[str, Tensor], classes: Sequence[str]) -> dict[str, object]:
    """Return the metrics of rows with one class each, and their ``classification_report``.

    ``loss`` is the mean over rows. ``majority_accuracy`` is the accuracy of always predicting the
    most frequent label of these rows. With two classes there is also ``f1``, that of the second
    class. All are ``None`` without rows.
    """
    names = ["loss", "accuracy", "majority_accuracy", "macro_f1"]
    if len(classes) == 2:
        names.insert(3, "f1")
    rows = len(outputs.get("label", ()))
    if not rows:
        return dict.fromkeys((*names, "classification_report"))
    label, prediction = outputs["label"], outputs["prediction"]
    scores = class_scores(label, prediction, len(classes))
    metrics = {
        "loss": outputs["loss"].double().mean().item(),
        "accuracy": scores.accuracy,
        "majority_accuracy": label.bincount().max().item() / rows,
        "f1": scores.f1[-1].item(),
        "macro_f1": scores.f1.mean().item(),
    }
    report: dict[str, object] = {name: metrics[name] for name in names}
    report["classification_report"] = scores.table(classes)
    return report


def remark(
    metrics: Mapping[str, object], facts: Mapping[str, object], from_scratch: bool
) -> dict[str, str]:
    """Return a ``remark`` if the model is no better than always guessing the largest class.

    Otherwise returns nothing. ``facts`` are those of the datasets.
    """
    accuracy = metrics.get("accuracy", metrics.get("subset_accuracy"))
    majority = metrics.get("majority_accuracy")
    if not isinstance(accuracy, float) or not isinstance(majority, float):
        return {}
    if not accuracy <= majority:
        return {}
    no_better = "no better than always guessing the largest class"
    loss = metrics.get("loss")
    # A loss that is no number has diverged, too.
    if isinstance(loss, float) and not loss < DIVERGED:
        return {"remark": f"{no_better}: the loss is {loss:.3g}; try a lower --lr"}
    train = facts.get("train")
    trained = f"trained on {train['rows']} rows" if isinstance(train, dict) else "trained"
    remedy = "more rows, longer training or a higher --lr"
    if from_scratch:
        trained += " from random weights"
        remedy += ", or --model with pretrained weights"
    return {"remark": f"{no_better}: {trained}; what may help: {remedy}"}


def write_labels(folder: Path, labels: Sequence[int | str]) -> None:
    """Write ``LABELS`` to ``folder``."""
    text = json.dumps(list(labels), ensure_ascii=False, indent=2)
    (folder / LABELS).write_text(text + "\n", encoding="utf-8")


def read_labels(folder: Path) -> tuple[int | str, ...] | None:
    """Return the labels that ``write_labels`` wrote; ``None`` if there are none."""
    file = folder / LABELS
    if not file.is_file():
        return None
    return tuple(json.loads(file.read_text(encoding="utf-8")))
