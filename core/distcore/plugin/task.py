"""What is trained: the protocols of a task and of its data. Nothing here knows of ranks, devices or strategies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from distcore.config import RunConfig


Batch = dict[str, "Tensor"]
"""A micro-batch: tensors by name, each of shape ``(n, …)`` for n rows."""


class Dataset(Protocol):
    """Rows that can be fetched a batch at a time."""

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each row in tokens, int, shape ``(rows,)``: rows of like length share a micro-batch."""
        ...

    @property
    def items(self) -> np.ndarray:
        """What each row counts in the mean loss, int64, shape ``(rows,)``: 1 a sample, or its number of tokens."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate these rows, in this order, padded to the longest of them; every tensor starts with ``(n, …)``."""
        ...


@runtime_checkable
class Identified(Protocol):
    """A data set that can tell its rows from all others without reading them; a resume compares that."""

    @property
    def content(self) -> str:
        """A digest of what the rows say, in order; made when they were prepared, so that asking costs nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a task prepared: ``train`` to learn from, ``evaluation`` while training, ``test`` at the end."""

    train: Dataset
    evaluation: Dataset
    test: Dataset
    facts: dict[str, object] = field(default_factory=dict)
    """What the report should say of the data (classes, majority share, …), as JSON values."""


class Task(Protocol):
    """What is trained. Nothing in it knows of ranks, devices or strategies."""

    def prepare(self, config: RunConfig) -> Datasets:
        """Read, check and cache the data; called before ranks start and, cheap by then, once on each rank."""
        ...

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; the core has seeded the random state.

        On the meta device no weights are read.
        """
        ...

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the local folder whose safetensors files hold the weights; ``None`` for random ones or a hub's."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the *sum* of the loss over the items of ``batch``, a scalar. The core divides, once."""
        ...

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return tensors of shape ``(n, …)``, one entry a row, that evaluation needs."""
        ...

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Turn the outputs of a whole dataset, in its order, into metrics as JSON values; no outputs: no rows."""
        ...

    def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Iterable[dict[str, object]]:
        """Turn the same outputs into the lines of predictions.jsonl, one a row."""
        ...

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write into the run folder what a user of the model needs beside its weights; on the main rank."""
        ...


@runtime_checkable
class Suggests(Protocol):
    """A task that knows which values suit its model."""

    def suggest(self, config: RunConfig) -> Mapping[str, object]:
        """Return values by key of ``RunConfig`` for keys that the user left at 'auto' (``lr``); reads no data."""
        ...


@runtime_checkable
class Reopens(Protocol):
    """A task whose models can be built again without the data that they were trained on."""

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return data sets without rows, enough for ``build_model`` and ``save``, from what ``save`` wrote.

        ``None`` if it wrote nothing into ``folder``.
        """
        ...
