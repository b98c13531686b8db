"""A small task on texts, for tests that need rows of a file and a model of transformers, but no
task of distcore's own.

``--task`` takes ``TEXTS``; ``--data``, ``--model`` and the other flags are its options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from distcore import DataError, Datasets, Direction, RunConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

TEXTS = f"{__file__}:Texts"
"""Name of the task in a config or after ``--task``."""
UNTRACEABLE, WITHOUT_META_MODEL = f"{__file__}:Untraceable", f"{__file__}:WithoutMetaModel"
"""Names of the same task with a loss, or a model, that reads tensor values."""
PADDING, UNKNOWN, FIRST, LAST = range(4)
"""Special tokens. A row begins with ``FIRST`` and ends with ``LAST``."""


class TextRows:
    """Texts as word numbers, with labels; implements ``distcore.Dataset``."""

    def __init__(self, texts: list[list[int]], labels: list[int], content: str) -> None:
        self.texts, self.labels, self.content = texts, np.array(labels, dtype=np.int64), content
        self.lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self.items = np.ones_like(self.lengths)

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        import torch

        ids = torch.full((len(indices), int(self.lengths[indices].max())), PADDING)
        for place, index in enumerate(indices):
            ids[place, : self.lengths[index]] = torch.tensor(self.texts[index])
        labels = torch.from_numpy(self.labels[indices])
        return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


@dataclass(frozen=True, kw_only=True)
class TextDatasets(Datasets):
    """Datasets, with the sizes for the model."""

    words: int
    """Number of tokens."""
    classes: list[Any]
    """Classes of the file."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A class per text, by a transformers classifier; implements ``distcore.Task``."""

    metrics: ClassVar[dict[str, Direction]] = {"loss": "min", "accuracy": "max"}

    data: Path = Path("rows.json")
    """File with a text and a class per row; every fifth row is kept for the evaluation."""
    eval_data: Path | None = None
    """File of evaluation rows; default: the held-out rows."""
    model: str = "bert-tiny"
    """A folder of a classifier; any other name is that of a small BERT with random weights."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Tokens of a row; longer rows are cut."""
    dropout: float = 0.1
    """Probability of dropout in the small BERT."""

    def suggest(self, config: RunConfig) -> dict[str, object]:
        return {"lr": 5e-4}

    def prepare(self, config: RunConfig) -> TextDatasets:
        rows, content = _records(self.data), hashlib.sha256(self.data.read_bytes()).hexdigest()
        kept = rows[::5] if self.eval_data is None else _records(self.eval_data)
        words = {word for text, _ in rows for word in text.split()}
        numbers = {word: LAST + 1 + number for number, word in enumerate(sorted(words))}
        classes = sorted({label for _, label in rows})

        def made(some: list[tuple[str, Any]]) -> TextRows:
            texts = [[numbers.get(word, UNKNOWN) for word in text.split()] for text, _ in some]
            cut = [[FIRST, *text[: self.max_seq_len - 2], LAST] for text in texts]
            return TextRows(
                cut, [classes.index(label) for _, label in some], f"{content} {len(some)}"
            )

        evaluation = made(kept)
        return TextDatasets(
            train=made(rows),
            evaluation=evaluation,
            test=evaluation,
            words=LAST + 1 + len(words),
            classes=classes,
        )

    def weights_folder(self, config: RunConfig) -> Path | None:
        return Path(self.model) if Path(self.model).is_dir() else None

    def build_model(self, config: RunConfig, data: TextDatasets) -> nn.Module:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig

        auto: Any = AutoModelForSequenceClassification
        classes = [str(label) for label in data.classes]
        names: dict[str, Any] = {
            "id2label": dict(enumerate(classes)),
            "label2id": {name: number for number, name in enumerate(classes)},
        }
        if not Path(self.model).is_dir():
            shape: dict[str, Any] = {
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            }
            shape |= {"intermediate_size": 512, "vocab_size": data.words}
            shape |= {
                "hidden_dropout_prob": self.dropout,
                "attention_probs_dropout_prob": self.dropout,
            }
            return auto.from_config(BertConfig(**shape, **names))  # type: ignore[no-any-return]
        settings = AutoConfig.from_pretrained(self.model, **names)
        if torch.get_default_device().type == "meta":
            return auto.from_config(settings)  # type: ignore[no-any-return]
        return auto.from_pretrained(self.model, config=settings)  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(_logits(model, batch), batch["labels"], reduction="sum")

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        from torch.nn.functional import cross_entropy

        logits, labels = _logits(model, batch), batch["labels"]
        loss = cross_entropy(logits, labels, reduction="none")
        return {"loss": loss, "prediction": logits.argmax(-1), "label": labels}

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        if not outputs:
            return {"loss": None, "accuracy": None}
        right = outputs["prediction"] == outputs["label"]
        return {
            "loss": outputs["loss"].double().mean().item(),
            "accuracy": right.double().mean().item(),
        }

    def predictions(
        self, outputs: dict[str, Tensor], data: Datasets
    ) -> Iterable[dict[str, object]]:
        for index, prediction in enumerate(outputs["prediction"].tolist() if outputs else []):
            yield {"index": index, "prediction": prediction}


@dataclass(frozen=True, kw_only=True)
class Untraceable(Texts):
    """The task with a loss that reads tensor values, so that a step cannot
    be traced without them.
    """

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = _logits(model, batch)
        return logits[logits.flatten().nonzero()].sum()


@dataclass(frozen=True, kw_only=True)
class WithoutMetaModel(Texts):
    """The task with a model that reads tensor values, so that it cannot be built without them."""

    def build_model(self, config: RunConfig, data: TextDatasets) -> nn.Module:
        import torch

        return torch.nn.Linear(2, int(torch.ones(2).sum()))


def _records(file: Path) -> list[tuple[str, Any]]:
    """Rows of a JSON list or of JSON lines, each an object or a pair."""
    if not file.is_file():
        raise DataError(f"data file {file}: no such file")
    lines = filter(None, file.read_text().split("\n"))
    rows = json.loads(file.read_text()) if file.suffix == ".json" else map(json.loads, lines)
    pairs = ((row["text"], row["label"]) if isinstance(row, dict) else row for row in rows)
    return [(str(text), label) for text, label in pairs]


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits.float()
    return logits
