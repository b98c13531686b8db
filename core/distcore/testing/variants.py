"""Variants of the laws' task: other terms, losses and weights, a frozen
model, phases, own steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore.config import RunConfig
from distcore.plugin.task.datasets import counts_of
from distcore.plugin.task.frozen import INITIAL, FrozenModel, Initial
from distcore.plugin.task.phases import Phase
from distcore.plugin.task.step import Step
from distcore.plugin.task.task import Dataset, Datasets
from distcore.testing.problem import CLASSES, WIDTH, Block, Classifier, Problem, RandomRows, widened

BULK = (30522, 768)
"""Shape of a large weight: the embedding of a BERT of base size, 23 million elements."""
TERM = "size"
"""Name of the additional term."""
COUNTS = {
    "seen": torch.tensor(2**40 + 1),
    "rounded": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
}
"""Values of the additional buffers, as a training could leave them."""

TIMES = 6
"""How often a global batch has a row that is repeated."""

WEIGHTS_FILE = "model.safetensors"
"""The file of weights in a folder."""


class CountedRows(RandomRows):
    """Rows whose weight in the mean of the additional term is their number of tokens."""

    @property
    def counts(self) -> dict[str, np.ndarray]:
        """Weight of each row in the mean of the additional term."""
        return {TERM: self.lengths}


@dataclass(frozen=True, kw_only=True)
class TwoTerms(Problem):
    """Has an additional term over tokens, which keeps logits small; logs the
    share of right predictions.
    """

    logs: ClassVar[tuple[str, ...]] = (TERM, "right")

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the rows with counts."""
        train = CountedRows(self.rows, weighted=self.weighted)
        return dataclasses.replace(super().prepare(config), train=train)

    def loss(  # type: ignore[override]  # it has two terms, and logs
        self, model: nn.Module, batch: dict[str, Tensor], log: Callable[..., None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the additional term; log the rows that are right."""
        labels = batch["labels"]
        logits = model(batch["tokens"])
        is_right = logits.argmax(-1) == labels
        log("right", is_right.sum(), len(labels))
        losses = F.cross_entropy(logits, labels, reduction="none") * batch["items"]
        # Weighted by the number of tokens, without padding: the counts of the rows.
        tokens = (batch["tokens"] != 0).sum(-1)
        sizes = logits.square().mean(-1) * tokens
        return losses.sum(), {TERM: sizes.sum()}

    def mean_loss(
        self, module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
    ) -> Tensor:
        """Return the sum of both means."""
        loss, terms = self.loss(module, dataset.batch(rows), lambda *_: None)
        items = int(dataset.items[rows].sum())
        tokens = int(counts_of(dataset)[TERM][rows].sum())
        mean_loss: Tensor = loss / items
        mean_term: Tensor = terms[TERM] / tokens
        return mean_loss + mean_term


class BulkClassifier(Classifier):
    """The model with a large weight, the only one that gets a gradient other than zero."""

    def __init__(self, blocks: int, experts: int) -> None:
        """Start the large weight at zero."""
        super().__init__(blocks=blocks, experts=experts)
        self.bulk = nn.Parameter(torch.zeros(BULK))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits that depend on the large weight alone, equal for all rows and classes."""
        product = (self.bulk @ bulk_noise(self.bulk.device)).sum()
        return super().forward(tokens) * 0.0 + product


def bulk_noise(device: torch.device) -> Tensor:
    """Return each row of the gradient of the large weight: values without a pattern,
    from -1 to 1.
    """
    numbers = torch.arange(1.0, BULK[1] + 1, device=device)
    return numbers.mul(12.9898).sin()


@dataclass(frozen=True, kw_only=True)
class Bulky(Problem):
    """Has a gradient of 23 million elements, whose norm is known."""

    def prepare(self, config: RunConfig) -> Datasets:
        """Return one global batch, whose number of items is a power of two, so that no
        division rounds the gradient.
        """
        data = super().prepare(config)
        rows = len(data.train)
        next_power_of_two = 1 << (rows - 1).bit_length()
        missing = next_power_of_two - rows
        train = RandomRows(rows)
        train.items[:missing] += 1
        return dataclasses.replace(data, train=train)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with the large weight."""
        return BulkClassifier(self.blocks, self.experts)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return a logit of each row times its items, summed."""
        logits: Tensor = model(batch["tokens"])
        return (logits[:, 0] * batch["items"]).sum()

    @staticmethod
    def norm() -> float:
        """Return the norm of the gradient of the mean loss, computed in fp64."""
        squares = bulk_noise(torch.device("cpu")).double().square()
        return float((squares.sum() * BULK[0]).sqrt())


@dataclass(frozen=True, kw_only=True)
class Counts(Problem):
    """Its model has buffers of other dtypes, such as a count of batches
    that no smaller dtype holds.
    """

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with these buffers."""
        model = super().build_model(config, data)
        for name, value in COUNTS.items():
            model.register_buffer(name, torch.zeros_like(value))
        return model


@dataclass(frozen=True, kw_only=True)
class Wide(Problem):
    """Four rows whose gradients fp64 cannot add exactly, in each order that four can have."""

    size: float = 16.0
    """Absolute value of the large gradients of a step's rows."""
    tiny: float = 2.0**-60
    """The small gradient, which fp64 loses beside a large one."""

    def prepare(self, config: RunConfig) -> Datasets:
        """Return rows whose labels count from 0 to 3, again and again."""
        train, evaluation = RandomRows(self.rows), RandomRows(self.evaluation_rows, seed=1)
        train.labels = np.arange(self.rows) % CLASSES
        return Datasets(train=train, evaluation=evaluation, test=evaluation)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a sum with factors, whose gradients are these."""
        # A step of four rows has a fourth of each as its share of the mean.
        return Factors(self.size * CLASSES, self.tiny * CLASSES)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of the outputs."""
        total: Tensor = model(batch["labels"]).sum()
        return total


class Factors(nn.Module):
    """A sum of one weight for each order of four factors: ``size``, ``tiny``, 0 and ``-size``."""

    def __init__(self, size: float, tiny: float) -> None:
        """Start from weights of 0."""
        super().__init__()
        orders = permutations((size, tiny, 0.0, -size))
        self.factors = torch.tensor(list(orders)).T.contiguous()
        self.weight = nn.Parameter(torch.zeros(self.factors.shape[1]))

    def forward(self, labels: Tensor) -> Tensor:
        """Return, per label from 0 to 3, the sum with the factors in its place of each order."""
        output: Tensor = (self.factors.to(labels.device)[labels] * self.weight).sum(-1)
        return output


@dataclass(frozen=True, kw_only=True)
class Odd(Problem):
    """A model of which whole vectors of a processor fill neither tensors nor shards of them."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a sum over many tensors, each of which has such ends."""
        return Ends()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of the outputs, weighted by the rows' items."""
        total: Tensor = (model(batch["labels"]) * batch["items"]).sum()
        return total


class Ends(nn.Module):
    """A sum over tensors of 93 elements: of two, three or four shards most have ends, too."""

    tensors = 24
    elements = 93

    def __init__(self) -> None:
        """Initialize the weights from torch's random state."""
        super().__init__()
        shape = (self.tensors, CLASSES, self.elements)
        self.factors = nn.Buffer(torch.randn(shape))
        self.weights = nn.ParameterList(torch.randn(self.elements) for _ in range(self.tensors))

    def forward(self, labels: Tensor) -> Tensor:
        """Return, per label, the sum over all weights of what they saturate at."""
        products = [
            factors[labels] * weight
            for factors, weight in zip(self.factors, self.weights, strict=True)
        ]
        output: Tensor = torch.stack(products).tanh().sum((0, -1))
        return output


@dataclass(frozen=True, kw_only=True)
class Referenced(Problem):
    """Also stays near the model as it began."""

    def frozen(self, config: RunConfig, data: Datasets) -> dict[str, Initial]:
        """Return the model as it began."""
        return {"reference": INITIAL}

    def consult(
        self, frozen: Mapping[str, Callable[..., Tensor]], batch: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the logits that it had then."""
        return batch | {"began": frozen["reference"](batch["tokens"]).float()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss with the squared distance from these."""
        logits: Tensor = model(batch["tokens"])
        distances: Tensor = (logits - batch["began"]).square().sum(-1)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return ((losses + distances) * batch["items"]).sum()

    def mean_loss(
        self, module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
    ) -> Tensor:
        """Return it for the logits of ``began``."""
        batch = dataset.batch(rows)
        with torch.no_grad():
            batch["began"] = began.eval()(batch["tokens"]).float()
        items = int(dataset.items[rows].sum())
        mean: Tensor = self.loss(module, batch) / items
        return mean


@dataclass(frozen=True, kw_only=True)
class WholeBatch(Problem):
    """Also makes logits uncorrelated over the global batch."""

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return logits and loss of each row, and a value without influence on the loss."""
        logits = model(batch["tokens"]).float()
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return {"logits": logits, "loss": losses, "unused": logits.sum(-1)}

    def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor) -> Tensor:
        """Return the mean loss, and how far the correlation matrix is from a diagonal of ones."""
        logits = embeddings["logits"] - embeddings["logits"].mean(0)
        correlation = logits.T @ logits / len(rows)
        unit = torch.eye(len(correlation), device=correlation.device)
        return embeddings["loss"].mean() + (correlation - unit).square().sum()

    def mean_loss(
        self, module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
    ) -> Tensor:
        """Return it for the whole global batch at once."""
        embeddings = self.embed(module, dataset.batch(rows))
        return self.batch_loss(embeddings, torch.as_tensor(rows))


class RepeatedRows(RandomRows):
    """Rows of which a global batch has each several times, as a mixture may."""

    def row_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of an epoch: some of the rows, each ``TIMES`` times."""
        rows = np.arange(len(self))
        return np.repeat(rows, TIMES)[: len(rows)]


@dataclass(frozen=True, kw_only=True)
class Repeating(WholeBatch):
    """Has rows several times in a global batch; dropout gives each of them other embeddings."""

    def prepare(self, config: RunConfig) -> Datasets:
        """Return such rows."""
        train = RepeatedRows(self.rows, weighted=self.weighted)
        return dataclasses.replace(super().prepare(config), train=train)


@dataclass(frozen=True, kw_only=True)
class Adding(Problem):
    """Also adds up its metrics over batches."""

    def sums(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sums of exponentials of multiples of the logits, and the number of rows."""
        # Of numbers with fewer digits than fp64 the sums would be the same in any order, and a
        # single sum may be so by chance.
        logits = model(batch["tokens"]).double()
        multiples = logits[..., None] * torch.arange(1, 9, device=logits.device)
        return {"exponentials": multiples.exp().sum((0, 1)), "rows": torch.tensor(len(multiples))}

    def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return their means over rows; none without rows."""
        if not sums:
            return {"exponentials": []}
        return {"exponentials": (sums["exponentials"] / sums["rows"]).tolist()}


@dataclass(frozen=True, kw_only=True)
class Phased(Problem):
    """Two players in turn: the head classifies, then the body of the model leads it astray."""

    def phases(self) -> dict[str, Phase]:
        """Return both, with settings of their own for the head."""
        settings = {"lr_scale": 0.5, "betas": (0.5, 0.9), "weight_decay": 0.3}
        return {
            "head": Phase(r"^head\.", self.loss, settings),
            "body": Phase(r"^(embedding|blocks|unused)\.", self.deceive),
        }

    def deceive(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss with each row's label replaced by the next one."""
        return self.loss(model, batch | {"labels": (batch["labels"] + 1) % CLASSES})


@dataclass(frozen=True, kw_only=True)
class Climbing(Problem):
    """Makes its own steps: with the gradient a little up the loss (sharpness-aware minimization,
    Foret et al. 2021).
    """

    def train_step(self, step: Step) -> Tensor:
        """Make a step of two passes."""
        loss = step.gradients()
        self.climb(list(step.parameters.values()), step.norm, step.gradients)
        step.apply()
        return loss

    @staticmethod
    def climb(
        parameters: list[nn.Parameter],
        norm: Callable[[Sequence[Tensor]], Tensor],
        again: Callable[[], object],
    ) -> None:
        """Replace the gradients by those that ``again`` sets, with the parameters
        0.5 up their gradients.
        """
        used = [
            (parameter, parameter.grad) for parameter in parameters if parameter.grad is not None
        ]
        scale = 0.5 / norm([gradient for _, gradient in used])
        moves = [(parameter, gradient * scale) for parameter, gradient in used]

        @torch.no_grad()
        def move_parameters(sign: int) -> None:
            for parameter, move in moves:
                parameter.add_(move, alpha=sign)

        move_parameters(1)
        again()
        move_parameters(-1)


@dataclass(frozen=True, kw_only=True)
class Stored(Problem):
    """Its frozen weight has another dtype than the others."""

    stored: torch.dtype
    """Dtype of that weight."""
    wide: bool = False
    """True if the same values are in fp32 instead."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with this weight."""
        model = super().build_model(config, data)
        weight = model.get_parameter("frozen.weight")
        values = weight.data
        if self.stored == torch.uint8:
            values = ((values + 1) * 128).round()
        stored = values.to(self.stored)
        weight.data = widened(stored) if self.wide else stored
        return model


@dataclass(frozen=True, kw_only=True)
class LongRows(Problem):
    """Has a trained weight with rows that are long enough for moments in 8 bits."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with two trained layers in place of the frozen one."""
        model: Any = super().build_model(config, data)
        inner_width = 6 * WIDTH
        up = nn.Linear(WIDTH, inner_width)
        down = nn.Linear(inner_width, WIDTH)
        model.frozen = nn.Sequential(up, nn.GELU(), down)
        return model  # type: ignore[no-any-return]


class NormalizedBlock(Block):
    """A block with batch normalization, which counts the batches that it has seen."""

    def __init__(self, dropout: float, recomputed: bool) -> None:
        """Have the forward pass compute the block; if ``recomputed``, once more
        in the backward pass.
        """
        super().__init__(dropout)
        self.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]
        self.recomputed = recomputed

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors."""
        if self.recomputed and self.training:
            return checkpoint(super().forward, hidden, use_reentrant=False)  # type: ignore[no-any-return]
        return super().forward(hidden)


@dataclass(frozen=True, kw_only=True)
class Normalized(Problem):
    """Its blocks have batch normalization, over the rows of a micro-batch."""

    recomputed: bool = False
    """True if blocks are computed again in the backward pass."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with such blocks."""
        model: Any = super().build_model(config, data)
        model.blocks = nn.ModuleList(
            NormalizedBlock(self.dropout, self.recomputed) for _ in range(self.blocks)
        )
        return model  # type: ignore[no-any-return]


class LossHead(nn.Linear):
    """A head that returns the sum of the losses of ``labels``, row by row, in place of logits."""

    labels: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return that loss, shape ``(1, 1)``, or logits without labels."""
        if self.labels is None:
            return super().forward(input)
        total = input.new_zeros(1, 1)
        # Row numbers as tensors of one element: they keep the dimension of the batch.
        for row in torch.arange(len(input), device=input.device)[:, None]:
            logits = F.linear(input[row], self.weight, self.bias)
            total = total + F.cross_entropy(logits, self.labels[row])
        return total


class ChunkedClassifier(Classifier):
    """The model with such a head, which ranks do not split."""

    tp_plan: ClassVar = {name: way for name, way in Classifier.tp_plan.items() if name != "head"}

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss of ``labels``, or logits."""
        head: Any = self.head
        head.labels = labels
        return super().forward(tokens)


@dataclass(frozen=True, kw_only=True)
class Chunked(Problem):
    """Its head computes the loss, row by row, as for a large vocabulary."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with this head."""
        model = ChunkedClassifier(blocks=self.blocks, experts=self.experts)
        model.head.__class__ = LossHead
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        total: Tensor = model(batch["tokens"], batch["labels"])
        return total.sum()

    def mean_loss(
        self, module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
    ) -> Tensor:
        """Return it from whole logits."""
        return super().loss(module, dataset.batch(rows)) / len(rows)


@dataclass(frozen=True, kw_only=True)
class FromFiles(Problem):
    """Has the weights of a folder's files, which may have a head of its own for a model that is
    built with a tied one.

    A whole load then keeps both, as ``from_pretrained`` of transformers does.
    """

    folder: Path
    """The folder of the files, which ``write_files`` has written."""

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the folder."""
        return self.folder

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with the weights of the files; on the meta device, as
        its settings have it.
        """
        return filled(super().build_model(config, data), self.folder)


@dataclass(frozen=True, kw_only=True)
class Taught(Referenced):
    """Stays near a frozen model that has the weights of a folder's files."""

    folder: Path
    """The folder of the files, which ``write_files`` has written."""

    def frozen(self, config: RunConfig, data: Datasets) -> dict[str, FrozenModel]:  # type: ignore[override]
        """Return the model of the files."""
        return {"reference": FrozenModel(self.teacher, self.folder)}

    def teacher(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the frozen model."""
        return filled(super().build_model(config, data), self.folder)

    def mean_loss(
        self, module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
    ) -> Tensor:
        """Return it for the model of the files in place of ``began``."""
        device = next(began.parameters()).device
        teacher = filled(began, self.folder).to(device)
        return super().mean_loss(module, teacher, dataset, rows)


def write_files(folder: Path, problem: Problem, has_own_head: bool) -> None:
    """Write the weights of a new model of ``problem`` to ``folder``, and
    with ``has_own_head`` another head.

    Without it the head of a model that ties it is left out, as in files of transformers.
    """
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    model = Classifier(tied=problem.tied, blocks=problem.blocks, experts=problem.experts)
    tensors = {name: value.clone() for name, value in model.named_parameters()}
    if has_own_head:
        tensors["head.weight"] = torch.randn_like(model.head.weight)
    save_file(tensors | dict(model.named_buffers()), folder / WEIGHTS_FILE)


def filled(model: Any, folder: Path) -> nn.Module:
    """Return ``model`` with the weights of the files in ``folder``; on the meta
    device, as it is.
    """
    if next(model.parameters()).is_meta:
        return model  # type: ignore[no-any-return]
    tensors = load_file(folder / WEIGHTS_FILE)
    if "head.weight" in tensors:
        model.head.weight = nn.Parameter(tensors["head.weight"])
    model.load_state_dict(tensors, strict=False)
    return model  # type: ignore[no-any-return]
