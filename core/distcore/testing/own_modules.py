"""Problems with what people's modules do: hooks, weights and states that forward writes,
odd dtypes, own gradients.

Each is the laws' task with one habit of a module, a loss or an extension of a user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from distcore.config import RunConfig
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hookspecs import hookimpl
from distcore.plugin.task.task import Dataset, Datasets
from distcore.testing.problem import WIDTH, Block, Classifier, Problem

CLAMP = 0.1
"""Largest weight of a layer that clamps its weights; about half of them start above it."""
STEEP = 1e-3
"""Largest element of a gradient that a hook lets pass; most elements of a
micro-batch's gradient are larger.
"""
BUFFERS = {
    "keys": torch.tensor([2**60 + 12345, 3**37]),
    "bits": torch.tensor([2**64 - 1, 1], dtype=torch.uint64),
    "turns": torch.polar(torch.ones(3), torch.arange(3) * 0.7),
    "eighths": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "fine": torch.tensor([1 / 3], dtype=torch.float64),
    "none": torch.empty(0, 3),
}
"""Values of buffers of which no other dtype holds all bits, by name."""


@dataclass(frozen=True, kw_only=True)
class Built(Problem):
    """A problem whose model is changed after it was built."""

    change: Callable[[Any], None]
    """Changes the model, in place."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the changed model."""
        model = super().build_model(config, data)
        self.change(model)
        return model


# Hooks on gradients


def halve_gradients(model: Any) -> None:
    """Let half of the rows of a weight train at half the speed, and the others not at all."""
    weight = model.blocks[0].up.weight
    mask = torch.zeros_like(weight)
    mask[: len(mask) // 2] = 0.5
    weight.register_hook(lambda gradient: gradient * mask.to(gradient.device))


def clamp_gradients(model: Any) -> None:
    """Clamp the gradient of a weight: of each micro-batch's share, and so with another
    sum for each cut.
    """
    weight = model.blocks[0].up.weight
    weight.register_hook(lambda gradient: gradient.clamp(-STEEP, STEEP))


# Weights


class Clamped(nn.Linear):
    """A linear layer that clamps its weight before each product, as the critic
    of a Wasserstein GAN.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Clamp, and return the output of the layer."""
        with torch.no_grad():
            self.weight.clamp_(-CLAMP, CLAMP)
        return super().forward(input)


def clamp_weights(model: Any) -> None:
    """Have a layer write its weight in forward."""
    model.blocks[0].up.__class__ = Clamped


def limit_norms(model: Any) -> None:
    """Have the embedding scale down, in forward, the rows that it reads."""
    model.embedding.max_norm = 1.0


class ReadsItsWeight(nn.Linear):
    """A linear layer that divides by the mean size of its weight, a plain number,
    as a quantization scale.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled output."""
        output = super().forward(input)
        mean_size = self.weight.detach().abs().mean().item()
        return output / (10 * mean_size)


def read_own_weight(model: Any) -> None:
    """Have a layer read its own weight as a number."""
    model.blocks[0].up.__class__ = ReadsItsWeight


class ReadsAChild(Classifier):
    """The model, whose forward pass divides by a number from the weight of a layer
    inside of a block.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scaled logits."""
        block: Any = self.blocks[0]
        logits: Tensor = super().forward(tokens)
        mean_size: float = block.up.weight.detach().abs().mean().item()
        return logits / (10 * mean_size)


def read_weight_of_child(model: Any) -> None:
    """Have a parent read its child's weight as a number."""
    model.__class__ = ReadsAChild


class UsesAChild(Classifier):
    """The model, whose forward pass multiplies with the weight of a layer inside of a block."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scaled logits."""
        block: Any = self.blocks[0]
        logits: Tensor = super().forward(tokens)
        mean_square: Tensor = block.up.weight.square().mean()
        return logits * (1 + mean_square)


def use_weight_of_child(model: Any) -> None:
    """Have a parent compute with its child's weight."""
    model.__class__ = UsesAChild


# States


class SpectralBlock(Block):
    """A block with spectral normalization, whose power iteration goes on with each forward pass."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.bounded = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors."""
        bounded: Tensor = self.bounded(hidden)
        return super().forward(hidden) + bounded


def bound_spectrum(model: Any) -> None:
    """Have blocks with spectral normalization."""
    model.blocks = nn.ModuleList(SpectralBlock() for _ in model.blocks)


class CountingBlock(Block):
    """A block with instance normalization, whose statistics follow from the rows, and with
    counts of its own.
    """

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("largest", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(2**60))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors, and count the rows."""
        buffers: Any = self._buffers
        if self.training:
            with torch.no_grad():
                largest = torch.maximum(buffers["largest"], hidden.abs().amax(0))
                buffers["largest"].copy_(largest)
                buffers["seen"].add_(len(hidden))
        channels = hidden.view(len(hidden), 4, -1)
        normalized: Tensor = self.instance(channels).flatten(1)
        return super().forward(normalized)


def count_in_forward(model: Any) -> None:
    """Have blocks that update buffers in forward."""
    model.blocks = nn.ModuleList(CountingBlock() for _ in model.blocks)


class Stateful(nn.Linear):
    """A head with a buffer of each odd dtype and extra state, all of which its output follows."""

    def keep_state(self) -> None:
        """Register the state; a layer that exists becomes one of this class."""
        for name, value in BUFFERS.items():
            self.register_buffer(name, value.clone())
        self.passes = 0
        self.memory = torch.zeros(2, dtype=torch.int64)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the number of training passes, and a large number for it."""
        return {"passes": self.passes, "memory": [self.memory]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what ``get_extra_state`` returned."""
        self.passes = state["passes"]
        [self.memory] = state["memory"]

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer, turned by the complex buffer and moved by
        the count of passes.
        """
        if self.training:
            self.passes += 1
            self.memory = self.memory + 2**58 + 1
        buffers: Any = self._buffers
        outputs = super().forward(input)
        # What is added grows with the class: the same for all classes would change no loss.
        number = torch.arange(outputs.shape[1], device=outputs.device)
        turned = (outputs * buffers["turns"].sum()).real * number
        of_keys = ((buffers["keys"] >> 2) % 7).sum()
        of_eighths = buffers["eighths"].float().sum() / 448
        shift = of_keys + of_eighths + self.passes
        moved: Tensor = outputs + 0.1 * turned + 0.01 * shift * number
        return moved


def keep_odd_states(model: Any) -> None:
    """Have a head with state of every kind."""
    model.head.__class__ = Stateful
    model.head.keep_state()


class EmptyBlock(Block):
    """A block with a parameter that has no elements, as one with room for options that are off."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.empty = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors."""
        return super().forward(hidden + self.empty.sum(0))


def add_nothing(model: Any) -> None:
    """Have blocks with a parameter without elements."""
    model.blocks = nn.ModuleList(EmptyBlock() for _ in model.blocks)


class TurningBlock(Block):
    """A block with a complex parameter."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        angles = torch.arange(WIDTH) * 0.1
        self.turn = nn.Parameter(torch.polar(torch.ones(WIDTH), angles))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors."""
        turned = hidden * self.turn
        return super().forward(turned.real + turned.imag)


def turn_rows(model: Any) -> None:
    """Have blocks with a complex parameter."""
    model.blocks = nn.ModuleList(TurningBlock() for _ in model.blocks)


# Gradients


class Scaled(Classifier):
    """The model, which takes a factor for each row."""

    def forward(self, tokens: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return logits; with ``factor``, shape ``(n, 1)``, a function of it, too."""
        logits = super().forward(tokens)
        if factor is None:
            return logits
        return logits * factor + (logits * factor).sin()


@dataclass(frozen=True, kw_only=True)
class Sloped(Problem):
    """Its loss or its outputs follow from the gradient with respect to an input of the model."""

    penalized: bool = False
    """True if the loss has that gradient with one of its own, as a gradient penalty; False:
    as a plain number.
    """
    evaluated: bool = False
    """True if the outputs of an evaluation have it, and the loss has not."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model with an input of floats."""
        model = super().build_model(config, data)
        model.__class__ = Scaled
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss; with the slope of each row, unless only an evaluation has it."""
        if self.evaluated:
            return super().loss(model, batch)
        logits, slope = self._slope(model, batch)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        penalties = (slope - 1).square()
        return ((losses + penalties) * batch["items"]).sum()

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of each row; with its slope, if an evaluation has it."""
        outputs = super().outputs(model, batch)
        if self.evaluated:
            with torch.enable_grad():
                _, slope = self._slope(model, batch)
            outputs["slope"] = slope.detach()
        return outputs

    def _slope(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits, and each row's gradient with respect to its factor, shape ``(n,)``."""
        labels = batch["labels"]
        factor = torch.ones(len(labels), 1, device=labels.device, requires_grad=True)
        logits = model(batch["tokens"], factor)
        (slope,) = torch.autograd.grad(
            logits.sum(), factor, create_graph=self.penalized, retain_graph=True
        )
        return logits, slope[:, 0]


def make_sparse(model: Any) -> None:
    """Have an embedding whose gradient is sparse."""
    model.embedding.sparse = True


class BranchedBlock(Block):
    """A block with a layer for some rows only, which so is not used where a micro-batch
    has none of them.
    """

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors, for rows with a large first value through the other layer."""
        rows = hidden[:, 0] > 0.3
        if not rows.any():
            return super().forward(hidden)
        branched = torch.where(rows[:, None], hidden + self.aside(hidden), hidden)
        return super().forward(branched)


def branch_rows(model: Any) -> None:
    """Have blocks that take some rows through another layer."""
    model.blocks = nn.ModuleList(BranchedBlock() for _ in model.blocks)


@dataclass(frozen=True, kw_only=True)
class UsesItsModel(Problem):
    """Its loss uses a parameter of the model outside of ``model(...)``, as a
    penalty on large weights does.
    """

    built: list[Any] = field(default_factory=list, init=False, compare=False)
    """The model that was built last."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model, and keep it."""
        model = super().build_model(config, data)
        self.built[:] = [model]
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss with the penalty for each item."""
        loss = super().loss(model, batch)
        penalty = self._penalty(self.built[0])
        return loss + penalty * batch["items"].sum()

    def mean_loss(
        self, module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
    ) -> Tensor:
        """Return it for ``module``, which need not be the model that was built last."""
        items = int(dataset.items[rows].sum())
        mean_loss = super().loss(module, dataset.batch(rows)) / items
        return mean_loss + self._penalty(module)

    @staticmethod
    def _penalty(module: Any) -> Tensor:
        """Return the squared size of a weight in a block and of the head's bias."""
        of_weight: Tensor = module.blocks[0].up.weight.square().sum()
        of_bias: Tensor = module.head.bias.square().sum()
        return of_weight + of_bias


class SignsGradients:
    """An extension that replaces the whole gradient by its signs before the
    step, as signSGD does.
    """

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Any:
        """Change the gradients, and let the strategy step."""
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad.sign_().mul_(0.1)
        return (yield)
