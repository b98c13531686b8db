"""The laboratory of an optimizer's cases: a small model that is stepped by given gradients, or
trained by a session.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from distcore import RunConfig, Session, load_config
from distcore.model import optimizer_class, optimizer_factory
from distcore_workbench.kits.session_runs import step_until

STEPS = 6
WORDS, CLASSES, WIDTH, ROWS = 12, 3, 96, 24
"""Rows of matrices are so long that an optimizer which packs them into fewer bits does so."""
Gradient = Callable[[str, nn.Parameter, int], Tensor | None]
"""From a parameter's name, the parameter and the step's number."""


class Block(nn.Module):
    """A residual layer; optimizers that treat matrices of hidden layers differently
    look for repeated ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return new hidden vectors of the same shape."""
        return hidden + torch.tanh(self.up(self.norm(hidden)))


class Words(nn.Module):
    """Classifies a pair of words: an embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, shape ``(n, CLASSES)``, for words, int64, shape ``(n, 2)``."""
        hidden = self.embedding(words).sum(1)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@dataclass
class Stepped:
    """A model whose optimizer has made some steps."""

    module: nn.Module
    """The model."""
    optimizer: torch.optim.Optimizer
    """Its optimizer."""
    before: dict[str, Tensor]
    """The weights before the first step, by name."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights now, by name."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def changed(self) -> list[str]:
        """Return the names of the weights that the steps have changed."""
        return differing(self.weights, self.before)

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """Return what the optimizer keeps of a parameter."""
        return dict(self.optimizer.state.get(parameter, {}))


@dataclass
class OptimizerLab:
    """The optimizer, by the config of a small run."""

    settings: Mapping[str, Any]
    """The config for one process, by dotted key; names the optimizer and its options."""
    folder: Path
    """For run folders."""

    @property
    def plugin(self) -> Any:
        """The class of the optimizer's options."""
        return optimizer_class(self.config().optimizer.name)

    @property
    def options(self) -> set[str]:
        """Names of the optimizer's options."""
        return {field.name for field in dataclasses.fields(self.plugin)}

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases that the optimizer declares not to keep, with reasons."""
        declared: Mapping[str, str] = getattr(self.plugin, "exempt", {})
        return declared

    def config(self, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the config with changes by dotted key."""
        return load_config(None, {**self.settings, **(changes or {})})

    def build(
        self, module: nn.Module, changes: Mapping[str, Any] | None = None
    ) -> torch.optim.Optimizer:
        """Build the optimizer for a module, with changes to the config by dotted key."""
        return optimizer_factory(self.config(changes))(module)

    def begin(
        self, changes: Mapping[str, Any] | None = None, module: nn.Module | None = None
    ) -> Stepped:
        """Return the model, the same each time, or ``module``, with its optimizer,
        before the first step.
        """
        module = module or new_model()
        stepped = Stepped(module, self.build(module, changes), {})
        stepped.before = copy.deepcopy(stepped.weights)
        return stepped

    def step(
        self, stepped: Stepped, steps: range = range(STEPS), gradient: Gradient | None = None
    ) -> Stepped:
        """Make steps; ``gradient`` returns that of each parameter (default: random, the same
        for the same step).
        """
        for number in steps:
            for name, parameter in stepped.module.named_parameters():
                parameter.grad = (gradient or random_gradient)(name, parameter, number)
            stepped.optimizer.step()
        return stepped

    def train(self, run: str, until: int = STEPS, changes: Mapping[str, Any] | None = None) -> None:
        """Train a new model on words, or go on with ``run``, to step ``until``.

        Every rank calls.
        """
        more = {
            "out": str(self.folder / run),
            "max_steps": STEPS,
            "resume": "auto",
            **(changes or {}),
        }
        with Session(self.config(more), Words, rows()) as session:
            step_until(session, mean_loss, until)


def optimizer_lab(name: str, settings: Mapping[str, Any], folder: Path) -> OptimizerLab:
    """Return the lab of an optimizer, by its name or as ``file.py:Class``; raises DistcoreError if
    it is not built.
    """
    changes = {
        "optimizer.name": name,
        "device": "cpu",
        "lr": 1e-2,
        "nproc": 1,
        "strategy": "single",
    }
    changes |= {"global_batch_size": 8, "micro_batch_size": 2, "schedule.name": "constant"}
    lab = OptimizerLab(changes | dict(settings), folder)
    lab.build(new_model())
    return lab


def new_model() -> Words:
    """Return the model with the same weights each time."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Words()


def rows() -> TensorDataset:
    """Return pairs of words, with a class for each."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (ROWS, 2), generator=draw)
    return TensorDataset(words, words.sum(1) % CLASSES)


def mean_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the loss of a batch, summed over its rows."""
    words, classes = batch
    return cross_entropy(model(words), classes, reduction="sum")


def random_gradient(name: str, parameter: Tensor, step: int) -> Tensor:
    """Return a gradient that depends on name, shape and step alone."""
    draw = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(parameter.shape, generator=draw)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names under which two sets of tensors are not equal bit for bit."""
    names = []
    for name in sorted(one.keys() | other.keys()):
        is_in_both = name in one and name in other
        if not is_in_both or not torch.equal(one[name], other[name]):
            names.append(name)
    return names
