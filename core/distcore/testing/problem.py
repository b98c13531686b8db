"""A small training problem in which every law can be seen to hold or break, and its solution in plain PyTorch.

Rows are sequences of unequal length with unequal weight in the mean. The model has an embedding tied to nothing
or to a decoder, a normalisation, optional dropout, a frozen layer and, on request, a layer that takes no part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.plugin.task import Datasets

VOCABULARY, CLASSES, WIDTH = 32, 4, 16


class Rows:
    """``rows`` random token sequences of 2 to 12 tokens with a label and 1 to 3 items each, from ``seed``."""

    def __init__(self, rows: int, seed: int = 0, weighted: bool = False) -> None:
        random = np.random.default_rng(seed)
        self.lengths = random.integers(2, 13, size=rows)
        self.items = random.integers(1, 4, size=rows) if weighted else np.ones(rows, dtype=np.int64)
        self.tokens = [random.integers(1, VOCABULARY, size=length) for length in self.lengths]
        self.labels = random.integers(0, CLASSES, size=rows)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def content(self) -> str:
        return hashlib.sha256(np.concatenate([*self.tokens, self.labels]).tobytes()).hexdigest()

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        tokens = np.zeros((len(indices), self.lengths[indices].max()), dtype=np.int64)
        for row, index in enumerate(indices):
            tokens[row, : self.lengths[index]] = self.tokens[index]
        arrays = {"tokens": tokens, "labels": self.labels[indices], "items": self.items[indices]}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Classifier(nn.Module):
    """Mean of embeddings → two residual blocks → logits. ``frozen`` and ``unused`` are what their names say."""

    def __init__(self, dropout: float = 0.0, tied: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY if tied else CLASSES)
        if tied:
            self.head.weight = self.embedding.weight
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).unsqueeze(-1)
        hidden = (self.embedding(tokens) * mask).sum(1) / mask.sum(1)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden + self.frozen(hidden)) * self.scale
        return logits[:, :CLASSES]


class Block(nn.Module):
    """A residual feed-forward block with normalisation and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(hidden)))
        return hidden + self.dropout(self.down(inner))  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The task of the laws; implements ``distcore.Task``."""

    rows: int = 50
    evaluation_rows: int = 11
    dropout: float = 0.0
    tied: bool = False
    unused: bool = False
    weighted: bool = False

    def prepare(self, config: RunConfig) -> Datasets:
        evaluation = Rows(self.evaluation_rows, seed=1)
        return Datasets(train=Rows(self.rows, weighted=self.weighted), evaluation=evaluation, test=evaluation)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return Classifier(self.dropout, self.tied, self.unused)

    def weights_folder(self, config: RunConfig) -> Path | None:
        return None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="none")
        return (losses * batch["items"]).sum()

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(batch["tokens"]).float()
        return {
            "loss": F.cross_entropy(logits, batch["labels"], reduction="none"),
            "prediction": logits.argmax(-1),
            "label": batch["labels"],
        }

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        if not outputs:
            return {"loss": 0.0, "accuracy": 0.0}
        right = (outputs["prediction"] == outputs["label"]).double().mean()
        return {"loss": float(outputs["loss"].double().mean()), "accuracy": float(right)}

    def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Iterable[dict[str, object]]:
        for index, prediction in enumerate(outputs.get("prediction", torch.empty(0)).tolist()):
            yield {"index": index, "prediction": prediction}

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Nothing belongs with this model."""
