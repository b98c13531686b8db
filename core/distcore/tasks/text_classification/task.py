"""Text classification with a transformers model: one label per text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distcore.config import RunConfig
from distcore.plugin.task import Datasets
from distcore.tasks.pretrained import tokenizer_files
from distcore.tasks.text_classification.data.text import TextDatasets, prepare_text, without_rows
from distcore.tasks.text_classification.models import (
    build_classifier,
    from_scratch,
    model_folder,
    suggested_lr,
)
from distcore.tasks.text_classification.options import TextOptions

if TYPE_CHECKING:
    from torch import Tensor, nn


LABELS = "labels.json"
"""File with the labels in the order of class numbers, as the data file writes them."""


@dataclass(frozen=True, kw_only=True)
class TextClassification(TextOptions):
    """One label per text, by a transformers classifier; implements ``distcore.plugin.task.Task``."""

    def suggest(self, config: RunConfig) -> dict[str, object]:
        """Return ``lr``, the peak learning rate for the model, for a config that says ``auto``."""
        return {"lr": suggested_lr(self.model)}

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenised data sets, from the cache if they were prepared before.

        Raises DataError, ModelError or ConfigError.
        """
        return prepare_text(self, config.seed)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a classifier with one output per class of ``data``."""
        data = _text(data)
        return build_classifier(self, data.classes, vocab_size=data.vocab_size, pad_token=data.pad_token)

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the folder with the model's weights; ``None`` for a built-in model."""
        return None if from_scratch(self) else model_folder(self.model)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the rows of ``batch``: fp32, without dimensions."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(_logits(model, batch), batch["labels"], reduction="sum")

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``loss`` (fp32), ``prediction`` and ``label`` (int64) of each row, shape ``(n,)``."""
        from torch.nn.functional import cross_entropy

        logits = _logits(model, batch)
        loss = cross_entropy(logits, batch["labels"], reduction="none")
        return {"loss": loss, "prediction": logits.argmax(dim=-1), "label": batch["labels"]}

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return ``loss``, ``accuracy``, ``majority_accuracy`` and scikit-learn's ``classification_report``.

        ``loss`` is the mean over rows. ``majority_accuracy`` is the accuracy of always predicting the most frequent
        label of these rows. All four are ``None`` if there are no rows.
        """
        rows = len(outputs.get("label", ()))
        if not rows:
            return dict.fromkeys(("loss", "accuracy", "majority_accuracy", "classification_report"))
        label, prediction = outputs["label"], outputs["prediction"]
        return {
            "loss": outputs["loss"].double().mean().item(),
            "accuracy": (label == prediction).sum().item() / rows,
            "majority_accuracy": label.bincount().max().item() / rows,
            "classification_report": _classification_report(label, prediction, _text(data).classes),
        }

    def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, ``label`` and ``prediction`` of each row, in order; labels as the data file writes them."""
        labels = _text(data).labels
        if outputs:
            pairs = zip(outputs["label"].tolist(), outputs["prediction"].tolist(), strict=True)
            for index, (label, prediction) in enumerate(pairs):
                yield {"index": index, "label": labels[label], "prediction": labels[prediction]}

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write to ``folder`` what predictions need in addition to the weights: tokenizer files and ``labels.json``."""
        data = _text(data)
        folder.mkdir(parents=True, exist_ok=True)
        for file in tokenizer_files(data.tokenizer):
            shutil.copy(file, folder)
        names = json.dumps(list(data.labels), ensure_ascii=False, indent=2)
        (folder / LABELS).write_text(names + "\n", encoding="utf-8")

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return data sets without rows, with the classes and tokenizer that ``save`` wrote; ``None`` if it did not."""
        if not (folder / LABELS).is_file():
            return None
        return without_rows(tuple(json.loads((folder / LABELS).read_text(encoding="utf-8"))), folder)


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits in fp32, shape ``(n, classes)``: under autocast the model gives half precision."""
    answer = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits: Tensor = answer.logits.float()
    return logits


def _classification_report(label: Tensor, prediction: Tensor, classes: tuple[str, ...]) -> str:
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


def _text(data: Datasets) -> TextDatasets:
    if not isinstance(data, TextDatasets):
        raise TypeError(f"expected the data sets of prepare(), found {type(data).__name__}")
    return data
