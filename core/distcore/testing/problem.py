"""The small training task with which the laws are measured: it has
what strategies handle wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.plugin.task.task import Dataset, Datasets

VOCABULARY, CLASSES, WIDTH = 32, 4, 16
"""Number of token ids (0 is padding), number of classes, and size of a hidden vector."""


class RandomRows:
    """A dataset of random token sequences with random labels; implements ``distcore.Dataset``."""

    def __init__(self, rows: int, seed: int = 0, weighted: bool = False) -> None:
        """Make up ``rows`` sequences of 2 to 12 tokens, the same ones for the same ``seed``.

        A row counts as 1 item in the mean loss; if ``weighted``, as 1 to 3 items.
        """
        random = np.random.default_rng(seed)
        self.lengths = random.integers(2, 13, size=rows)
        """Tokens of each row, int64, shape ``(rows,)``."""
        self.items = np.ones(rows, dtype=np.int64)
        """Weight of each row in the mean loss, int64, shape ``(rows,)``."""
        if weighted:
            self.items = random.integers(1, 4, size=rows)
        self.tokens = [random.integers(1, VOCABULARY, size=length) for length in self.lengths]
        """Token ids of each row, int64, shape ``(length,)``; none is 0, which is padding."""
        self.labels = random.integers(0, CLASSES, size=rows)
        """Class of each row, int64, shape ``(rows,)``."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    @property
    def content(self) -> str:
        """The SHA-256 of tokens and labels, in hexadecimal digits."""
        values = np.concatenate([*self.tokens, self.labels])
        return hashlib.sha256(values.tobytes()).hexdigest()

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Collate the rows ``indices``, integers, shape ``(n,)``, n >= 1.

        Return int64 tensors on the CPU: ``tokens``, shape ``(n, longest)``, padded with 0, and
        ``labels`` and ``items``, shape ``(n,)``. Raises IndexError for a row that does not exist.
        """
        longest = self.lengths[indices].max()
        tokens = np.zeros((len(indices), longest), dtype=np.int64)
        for row, index in enumerate(indices):
            tokens[row, : self.lengths[index]] = self.tokens[index]
        arrays = {"tokens": tokens, "labels": self.labels[indices], "items": self.items[indices]}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Classifier(nn.Module):
    """The model: mean of the token embeddings, residual blocks, a frozen layer,
    and a linear head.
    """

    tp_plan: ClassVar = {
        "embedding": "embedding_rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }
    """How strategies that split layers over ranks split these, in the
    words of transformers' plans.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        tied: bool = False,
        unused: bool = False,
        blocks: int = 2,
        repeated: bool = False,
        experts: int = 0,
    ) -> None:
        """Initialize the weights from torch's random state.

        ``dropout`` is a probability. ``tied``: embedding and head share one weight. ``unused``:
        add a trainable layer that ``forward`` does not call. ``blocks`` is their number.
        ``repeated``: ``forward`` calls all of them twice. ``experts``: of a mixture in each block;
        0: none.
        """
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.passes = 2 if repeated else 1
        self.blocks = nn.ModuleList(
            MixtureBlock(dropout, experts) if experts else Block(dropout) for _ in range(blocks)
        )
        self.frozen = Widened(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY if tied else CLASSES)
        if tied:
            self.head.weight = self.embedding.weight
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape ``(n, CLASSES)``, for token ids, int64, shape ``(n, length)``, in
        which 0 is padding.
        """
        mask = (tokens != 0).unsqueeze(-1)
        hidden = (self.embedding(tokens) * mask).sum(1) / mask.sum(1)
        for _ in range(self.passes):
            for block in self.blocks:
                hidden = block(hidden)
        logits: Tensor = self.head(hidden + self.frozen(hidden)) * self.scale
        # A tied head returns a logit for each token id: the first ones are the classes.
        return logits[:, :CLASSES]


class ModelShape(NamedTuple):
    """What a strategy asks of the model of the laws."""

    blocks: int = 2
    """Number of blocks."""
    experts: int = 0
    """Experts of a mixture in each block; 0: none."""


def meta_model(shape: ModelShape) -> Classifier:
    """Return the model without memory for its weights."""
    with torch.device("meta"):
        return Classifier(blocks=shape.blocks, experts=shape.experts)


class Block(nn.Module):
    """A residual feed-forward block with layer normalization and dropout."""

    def __init__(self, dropout: float) -> None:
        """Initialize the weights from torch's random state; ``dropout`` is a probability."""
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors for ``hidden``; both have the shape ``(n, WIDTH)``."""
        # A strategy may split the inner vector over ranks, and with it the mask of its dropout.
        inner = self.dropout(F.gelu(self.up(self.norm(hidden))))
        outer = self.dropout(self.down(inner))
        return hidden + outer  # type: ignore[no-any-return]


class MixtureBlock(Block):
    """A block with a mixture of experts beside its layers: a router chooses two for each row."""

    chosen: ClassVar = 2
    """Experts that are chosen for a row."""

    def __init__(self, dropout: float, experts: int) -> None:
        """Initialize the weights from torch's random state; there are ``experts`` of them."""
        super().__init__(dropout)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = Experts(experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors for ``hidden``; both have the shape ``(n, WIDTH)``."""
        probabilities = self.router(hidden).float().softmax(-1)
        weights, chosen = probabilities.topk(self.chosen, dim=-1)
        mixed: Tensor = self.experts(hidden, chosen, weights.to(hidden.dtype))
        return super().forward(hidden) + mixed


class Experts(nn.Module):
    """Feed-forward experts, whose matrices are stacked, expert first, as in transformers."""

    stacked_experts: ClassVar = True
    """Marks them for strategies that share experts over ranks."""

    def __init__(self, number: int) -> None:
        """Initialize ``number`` experts from torch's random state."""
        super().__init__()
        self.num_experts = number
        """Experts that this module holds."""
        self.up = nn.Parameter(torch.randn(number, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(number, WIDTH, 2 * WIDTH) / (4 * WIDTH))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, shape ``(n, WIDTH)``.

        ``hidden`` has the shape ``(n, WIDTH)``, ``chosen``, numbers of experts, and ``weights``
        have ``(n, k)``.
        """
        total = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, places = torch.where(chosen == expert)
            # An expert that no row chose is left out, as in transformers.
            if len(rows):
                inner = F.gelu(F.linear(hidden[rows], self.up[expert]))
                output = F.linear(inner, self.down[expert]) * weights[rows, places, None]
                total = total.index_add(0, rows, output.to(total.dtype))
        return total


class Widened(nn.Linear):
    """A linear layer that widens its weight in each product. Bytes are codes of values
    from -1 to 1.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer."""
        weight = widened(self.weight).to(input.dtype)
        return F.linear(input, weight, self.bias)


def widened(weight: Tensor) -> Tensor:
    """Return the values of a stored weight in fp32."""
    if weight.dtype == torch.uint8:
        return weight.float() / 128 - 1
    return weight.float()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The task with which the laws are measured: classify random
    sequences; implements ``distcore.Task``.
    """

    rows: int = 50
    """Rows of the training data."""
    evaluation_rows: int = 11
    """Rows of the evaluation data."""
    dropout: float = 0.0
    """Probability of dropout in each block."""
    tied: bool = False
    """True if embedding and head share one weight."""
    unused: bool = False
    """True if the model has a trainable layer that no forward pass calls."""
    blocks: int = 2
    """Number of the model's blocks."""
    experts: int = 0
    """Experts of a mixture in each block; 0: none."""
    repeated: bool = False
    """True if a forward pass calls each block twice."""
    weighted: bool = False
    """True if training rows count as 1 to 3 items in the mean loss; otherwise each counts as 1."""
    scalar: bool = False
    """True if the model's last factor is a parameter without dimensions, not a buffer."""
    heavy: tuple[int, ...] = ()
    """Training rows whose gradient fp16 cannot hold; their labels are increased by ``CLASSES``."""

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the same rows for every ``config``; the test data are the evaluation data."""
        train = RandomRows(self.rows, weighted=self.weighted)
        evaluation = RandomRows(self.evaluation_rows, seed=1)
        train.labels[[*self.heavy]] += CLASSES
        return Datasets(train=train, evaluation=evaluation, test=evaluation)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return an untrained ``Classifier`` in fp32 on torch's default device."""
        model = Classifier(
            self.dropout, self.tied, self.unused, self.blocks, self.repeated, self.experts
        )
        if self.scalar:
            del model.scale
            model.scale = nn.Parameter(torch.tensor(1.0))
        return model

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return ``None``: the weights are random."""
        return None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross-entropy of each row times its items, summed over ``batch``;
        a scalar with gradient.
        """
        logits = model(batch["tokens"])
        losses = F.cross_entropy(logits, batch["labels"] % CLASSES, reduction="none")
        # Labels from CLASSES on mark heavy rows: their gradient overflows in fp16.
        factors = torch.where(batch["labels"] < CLASSES, 1.0, 2.0**20)
        return (losses * batch["items"] * factors).sum()

    def mean_loss(
        self, module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
    ) -> Tensor:
        """Return the loss of a global batch in plain PyTorch; ``began`` is the model
        before its first step.
        """
        items = int(dataset.items[rows].sum())
        return self.loss(module, dataset.batch(rows)) / items

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return, per row, ``loss`` (float32), ``prediction`` and ``label`` (int64),
        each of shape ``(n,)``.
        """
        logits = model(batch["tokens"]).float()
        return {
            "loss": F.cross_entropy(logits, batch["labels"], reduction="none"),
            "prediction": logits.argmax(-1),
            "label": batch["labels"],
        }

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over all rows, and ``accuracy``, from 0 to 1; both
        are 0 without rows.
        """
        if not outputs:
            return {"loss": 0.0, "accuracy": 0.0}
        loss = outputs["loss"].double().mean()
        accuracy = (outputs["prediction"] == outputs["label"]).double().mean()
        return {"loss": float(loss), "accuracy": float(accuracy)}

    def predictions(
        self, outputs: dict[str, Tensor], data: Datasets
    ) -> Iterable[dict[str, object]]:
        """Yield ``index`` and ``prediction`` of each row, in the order of the dataset."""
        predictions = outputs.get("prediction", torch.empty(0))  # no outputs without rows
        for index, prediction in enumerate(predictions.tolist()):
            yield {"index": index, "prediction": prediction}

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write nothing: this model needs no other files."""
