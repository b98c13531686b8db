"""The laboratory of a task's cases: the task, its data, and its model without dropout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distcore.config import RunConfig, load_config
from distcore.engine.build import new_run
from distcore.engine.frozen import with_frozen
from distcore.engine.mode import set_mode
from distcore.model.lora_base import base_of
from distcore.plugin.batching.columns import read
from distcore.plugin.strategy.contract import BaseModelRef, Run, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.losses import split_terms
from distcore.plugin.task.outputs import Collected, Collector
from distcore.plugin.task.task import Batch, Dataset, Datasets
from distcore.resolve.resolve import resolve
from distcore.strategies.single import SingleStrategy
from distcore.testing.store import environment_kept

ROWS = 9
"""Rows of a batch that is compared with its rows one by one."""


@dataclass
class TaskLab:
    """A task as the cases see it. They share data and models, and change neither."""

    config: RunConfig
    """Resolved, for one process."""
    task: BoundTask
    """The task, with the options of the config."""
    folder: Path
    """An empty folder for the task's files."""

    @property
    def exempt(self) -> Mapping[str, str]:
        """Cases and laws that the task declares not to keep, with reasons."""
        return self.task.exempt

    @cached_property
    def data(self) -> Datasets:
        """The task's datasets."""
        return self.task.prepare(self.config)

    def build(self) -> nn.Module:
        """Return a new model, from the seed of the config, without dropout and in
        the mode for training.
        """
        torch.manual_seed(self.config.seed)
        return disable_dropout(self.task.build_model(self.config, self.data)).train()

    def build_moved(self) -> nn.Module:
        """Return a model whose weights have left their first values, as after training: zeros
        can hide an influence.
        """
        model = self.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return model

    def rows(self, dataset: Dataset) -> np.ndarray:
        """Return the numbers of a few rows, int64, from the shortest to the longest, so
        that some are padded.
        """
        first_rows = np.arange(min(len(dataset), 1000))
        lengths = read(dataset.lengths, first_rows)
        by_length = first_rows[np.argsort(lengths, kind="stable")]
        count = min(ROWS, len(by_length))
        positions = np.linspace(0, len(by_length) - 1, count).astype(int)
        evenly_spaced: np.ndarray = by_length[np.unique(positions)]
        return evenly_spaced

    def train_batch(self) -> Batch:
        """Return a batch of a few training rows, those of ``rows``."""
        return self.data.train.batch(self.rows(self.data.train))

    def few(self) -> Datasets:
        """Return the datasets with the first rows of the evaluation data only, which also
        are the test data.
        """
        first = FirstRows(self.data.evaluation, 32)
        return replace(self.data, evaluation=first, test=first)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batch: Batch, rows: int, module: nn.Module | None = None
    ) -> Collected:
        """Evaluate a batch of ``rows`` rows, in evaluation mode; return the results.

        ``module`` is the model itself if ``model`` is a wrapper.
        """
        run = replace(self._run(model), module=module or model)
        set_mode(run, training=False)
        outputs, sums = self.task.evaluation.of_run(run)(self._consult(batch), rows)
        collector = Collector()
        collector.add(np.arange(rows), outputs, sums, is_counted=True)
        return collector.joined()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch, summed over its items."""
        loss, _ = split_terms(self.task.losses.unlogged(model, self._consult(batch)))
        return loss

    def loss_of_phase(self, phase: str, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of one phase for a batch, summed over its items."""
        compute_loss = self.task.losses.of_phases(lambda *_: None)[phase]
        loss, _ = split_terms(compute_loss(model, self._consult(batch)))
        return loss

    def all_terms(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the sum of the loss and its additional terms, and these by name."""
        loss, terms = split_terms(self.task.losses.unlogged(model, self._consult(batch)))
        return sum(terms.values(), loss), terms

    def evaluate_few(self, model: nn.Module) -> tuple[Datasets, Collected]:
        """Evaluate the first rows of the evaluation data; return them and the results."""
        few = self.few()
        rows = np.arange(len(few.evaluation))
        return few, self.evaluate(model, few.evaluation.batch(rows), len(rows))

    @torch.no_grad()
    def embeddings(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings of each row for a loss over the global batch."""
        return self.task.losses.embed(model, self._consult(batch))

    @cached_property
    def _consult(self) -> Callable[[Batch], Batch]:
        """Adds the outputs of the task's frozen models to a batch, as the core does in a run."""
        if not self.task.has("frozen"):
            return _unchanged
        module = self.build()
        run = self._run(module, base_of(self.config, self.task, module))
        with_models = with_frozen(run, _hooks(), self.task, self.data)
        return with_models.consult or _unchanged

    def _run(self, model: nn.Module, base: BaseModelRef | None = None) -> Run:
        """Return a run of ``model`` in one process, without an optimizer."""
        world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        run = new_run(self.config, _hooks(), world, self.task, model)
        return replace(run, base=base)


def _hooks() -> Hooks:
    """Return the hooks of one process."""
    return Hooks("single", SingleStrategy())


def _unchanged(batch: Batch) -> Batch:
    return batch


class FirstRows:
    """The first rows of a dataset, at most ``count``; implements ``distcore.Dataset``."""

    def __init__(self, dataset: Dataset, count: int) -> None:
        self._dataset = dataset
        self._rows = np.arange(min(len(dataset), count))
        self.lengths = read(dataset.lengths, self._rows)
        self.items = read(dataset.items, self._rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate the rows ``indices``, int64, shape ``(n,)``."""
        return self._dataset.batch(self._rows[indices])


def task_lab(name: str, settings: Mapping[str, Any], folder: Path) -> TaskLab:
    """Return the lab of the task ``name`` under ``settings``, config keys by
    dotted name; raises DistcoreError.
    """
    changes = {"task": name, "device": "cpu", "lr": 1e-3, "out": str(folder / "run"), **settings}
    resolved = resolve(load_config(None, changes))
    return TaskLab(config=resolved.config, task=resolved.task, folder=folder)


def disable_dropout(model: nn.Module) -> nn.Module:
    """Set the probability of every dropout in ``model`` to 0, and return it."""
    for module in model.modules():
        # Modules of libraries keep it in attributes such as attention_dropout; torch's own in p.
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            is_probability = "drop" in name or (name == "p" and is_dropout)
            if is_probability and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


@contextmanager
def on_another_rank() -> Iterator[None]:
    """Inside, the environment is that of rank 1 of 2; afterward it is as before."""
    with environment_kept():
        os.environ |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        yield
