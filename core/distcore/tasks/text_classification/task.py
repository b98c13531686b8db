"""Text classification with a transformers model: one label per text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from distcore.config import RunConfig
from distcore.plugin.task import Dataset, Datasets, FileRows
from distcore.tasks.pretrained import set_length, tokenizer_files
from distcore.tasks.text_classification.data.text import TextDatasets, prepare_text, without_rows
from distcore.tasks.text_classification.data.tokens import TokenDataset
from distcore.tasks.text_classification.data.unlabelled import UnlabelledTexts, unlabelled_texts
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
SCORED = 20
"""Most classes of a row whose scores are kept, so that an evaluation of very many classes fits into memory."""


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
        """Return ``prediction`` (int64) of each row, shape ``(n,)``, and its most probable classes.

        These are ``scored``, class numbers (int64) in ascending order, and ``scores``, their probabilities (fp32), both
        ``(n, k)``. Rows with labels have ``loss`` (fp32) and ``label`` (int64), too, shape ``(n,)``.
        """
        from torch.nn.functional import cross_entropy

        logits = _logits(model, batch)
        # Not by score: classes that are almost alike would change places with the rows that share a forward pass.
        scored = logits.topk(min(SCORED, logits.shape[-1])).indices.sort(dim=-1).values
        scores = logits.softmax(dim=-1).gather(-1, scored)
        found = {"prediction": logits.argmax(dim=-1), "scores": scores, "scored": scored}
        if "labels" not in batch:
            return found
        loss = cross_entropy(logits, batch["labels"], reduction="none")
        return {"loss": loss, "label": batch["labels"]} | found

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
        """Yield for each row, in order, where it came from, its label if it has one, prediction and scores.

        Where: ``index`` in the data set, ``file`` and ``row`` and, with a column for it, ``id``. Labels are as the data
        file writes them; ``scores`` have the probability of each class, at most ``SCORED``, the most probable first.
        """
        if not outputs:
            return
        data, test = _text(data), data.test
        origins = test.origins() if isinstance(test, TokenDataset | UnlabelledTexts) else repeat({})
        for index, (prediction, origin) in enumerate(zip(outputs["prediction"].tolist(), origins, strict=False)):
            label = {"label": data.labels[int(outputs["label"][index])]} if "label" in outputs else {}
            scores = zip(outputs["scored"][index].tolist(), outputs["scores"][index].tolist(), strict=True)
            best_first = sorted(scores, key=lambda scored: -scored[1])
            yield {
                "index": index,
                **origin,
                **label,
                "prediction": data.labels[prediction],
                "scores": {data.classes[number]: round(score, 6) for number, score in best_first},
            }

    def row_columns(self) -> dict[str, str]:
        """Return the columns of rows without labels: the text and, if a column is named for it, the id."""
        return {"columns.text": self.columns.text} | ({"columns.id": self.columns.id} if self.columns.id else {})

    def unlabelled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return texts that are tokenised when they are predicted; raises DataError for one that cannot be used."""
        return unlabelled_texts(rows, self, _text(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write to ``folder`` what predictions need in addition to the weights: tokenizer files and ``labels.json``.

        The tokenizer there cuts, where it is told to cut, where training did.
        """
        data = _text(data)
        folder.mkdir(parents=True, exist_ok=True)
        for file in tokenizer_files(data.tokenizer):
            shutil.copy(file, folder)
        set_length(folder, self.max_seq_len)
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
