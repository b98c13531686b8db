"""The types of a task and of its data. Nothing here knows of ranks, devices or strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from distcore.errors import TaskError

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from distcore.config import RunConfig
    from distcore.plugin.batching.columns import Column


Direction = Literal["min", "max"]
"""Whether a smaller or a larger value of a metric is better."""
OnResume = Literal["free", "ask", "other rows"]
"""What a resumed run may do with an option of its task, which must stay as it is without an entry.

``free``: change it. ``ask``: change it if the user accepts that with ``--resume-changed``. ``other rows``: the same,
and its training rows may then differ too.
"""

Batch = Any
"""A micro-batch: any nesting of dicts, lists and tuples, named ones too, that holds tensors and plain values.

Most tasks have a dict of tensors of shape ``(n, …)`` for n rows.
"""
Outputs = dict[str, Any]
"""Outputs of a whole dataset: a tensor ``(rows, …)`` or a ``Ragged`` by name, on the CPU; entry i is of row i."""


class Dataset(Protocol):
    """Rows that can be fetched a batch at a time; ``plugin.task.dataset_spec`` has the optional members."""

    @property
    def lengths(self) -> Column:
        """Length of each row in tokens: rows of like length share a micro-batch."""
        ...

    @property
    def items(self) -> Column:
        """What each row counts in the mean loss: 1 per sample, or its number of tokens."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate the rows ``indices``, int64, shape ``(n,)``, in this order and padded to the longest of them.

        Tensors are on the CPU; the core moves them to the device. The same rows give the same values each time, on
        every rank and in every loader process; what is random belongs into ``at``. On an accelerator it
        is called in a thread of its own, for the step after the present one, while the loss of this one is computed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a task prepared."""

    train: Dataset
    """What is learnt from."""
    evaluation: Dataset
    """What is evaluated while training, and at its end."""
    test: Dataset
    """What the final weights are tested on; may be the same object as ``evaluation``, and is then evaluated once."""
    facts: dict[str, object] = field(default_factory=dict)
    """What the report should say of the data (classes, majority share, …), as JSON values."""
    warnings: tuple[str, ...] = ()
    """What the user should know of the rows before training, one line each; the main rank logs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Rows of a data file that follow each other, for a task that predicts them."""

    file: str
    """The file, as the user named it."""
    start: int
    """Number of the first of these rows, counted from 1, without a header."""
    records: Sequence[tuple[object, ...]]
    """The values of each row in the columns that the task asked for, in that order."""
    ids: Sequence[int | str] | None = None
    """What the user calls each row; ``None`` where no column says it. The core adds it to the lines."""


class Task(Protocol):
    """What is trained. Nothing in it knows of ranks, devices or strategies.

    These two methods are all that a task must have for its type; ``plugin.task.spec.TaskSpec`` is the page of all of
    them, in the order in which they are called.
    """

    def prepare(self, config: RunConfig) -> Datasets:
        """Read, check and cache the data; called before ranks start and, cheap by then, once on each rank.

        Every rank must get the same rows in the same order. Raises DistcoreError for rows that cannot be used.
        """
        ...

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; the core has seeded the random state.

        On the meta device no weights are read; if it fails there, or gives values all the same, strategies that shard
        build the model whole instead. Raises DistcoreError where it cannot be built.
        """
        ...


def declared_metrics(task: object) -> Mapping[str, Direction]:
    """Return the metrics that a task, or a class of tasks, declares, with what is better; default: the loss.

    Raises TaskError for a direction other than ``min`` and ``max``.
    """
    declared: Mapping[str, Direction] = getattr(task, "metrics", {"loss": "min"})
    for name, direction in declared.items():
        if direction not in ("min", "max"):
            raise TaskError(f"task {type(task).__name__}: metrics[{name!r}] = {direction!r}: expected 'min' or 'max'")
    return declared
