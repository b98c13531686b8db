"""The types of a task and of its data. Nothing here knows of ranks, devices or strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, Union

from distcore.errors import TaskError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from distcore.config import RunConfig
    from distcore.plugin.batching.columns import Column


Direction = Literal["min", "max"]
"""The better direction of a metric: smaller or larger."""
OnResume = Literal["free", "ask", "other rows"]
"""Rule of a resume for an option of the task. Without a rule an option must not change.

``free``: it may change. ``ask``: it may change if the user accepts that by ``--resume-changed``.
``other rows``: as ``ask``, and the training rows may then differ, too.
"""

Batch = Any
"""A micro-batch: any nesting of dicts, lists and tuples that holds tensors and plain values.

Most tasks have a dict of tensors of shape ``(n, …)`` for n rows.
"""
Losses = Union["Tensor", tuple["Tensor", Mapping[str, "Tensor"]]]
"""The sum of a loss and, where it has more terms, the sum of each of these by name."""
Outputs = dict[str, Any]
"""Outputs of a whole dataset by name, on the CPU: a tensor ``(rows, …)`` or a ``Ragged``.

Entry i is of row i.
"""


class Dataset(Protocol):
    """Rows that can be fetched a batch at a time; ``dataset_spec`` has the optional members."""

    @property
    def lengths(self) -> Column:
        """Length of each row in tokens, or 1: rows of like length share a micro-batch."""

    @property
    def items(self) -> Column:
        """Weight of each row in the mean loss: 1, or for example its number of tokens."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate the rows ``indices``, int64 ``(n,)``, in order, padded to the longest of them.

        Tensors are on the CPU; the core moves them to the device. The same rows must give the same
        values each time, on every rank and in every loader process; randomness belongs into ``at``.
        On an accelerator a separate thread calls it for the next step, while the device computes
        the current one.
        """


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The result of a task's ``prepare``."""

    train: Dataset
    """Training rows."""
    evaluation: Dataset
    """Rows of the evaluations during training, and at its end."""
    test: Dataset
    """Rows of the final test; if they are the object ``evaluation``, it is evaluated once."""
    evaluations: Mapping[str, Dataset] = field(default_factory=dict)
    """Several evaluation sets by name, ``evaluation`` first; metrics are then ``hard/loss``."""
    facts: dict[str, object] = field(default_factory=dict)
    """Facts about the data for the report (classes, majority share, …), as JSON values."""
    warnings: tuple[str, ...] = ()
    """Warnings about the rows, one line each; the main rank logs them before training."""

    @property
    def loaded_tokenizer(self) -> Any:
        """What makes inputs of the model, such as a tokenizer, for ``distcore.load``; ``None``:
        the task has nothing of the kind.
        """
        return None

    def mapped(self, change: Callable[[Dataset], Dataset | None]) -> Self | None:
        """Return the datasets after ``change``; ``None`` if it returns ``None`` for one.

        Equal ones stay one object.
        """
        changed_by_id: dict[int, Dataset] = {}
        for rows in (self.train, self.evaluation, self.test, *self.evaluations.values()):
            if id(rows) not in changed_by_id:
                changed = change(rows)
                if changed is None:
                    return None
                changed_by_id[id(rows)] = changed
        return replace(
            self,
            train=changed_by_id[id(self.train)],
            evaluation=changed_by_id[id(self.evaluation)],
            test=changed_by_id[id(self.test)],
            evaluations={name: changed_by_id[id(rows)] for name, rows in self.evaluations.items()},
        )

    def metrics_of_sets(self, declared: Mapping[str, Direction]) -> Mapping[str, Direction]:
        """Return the ``declared`` metrics by their names in an evaluation.

        With several sets these are such as ``hard/loss``.
        """
        if not self.evaluations:
            return declared
        return {
            f"{name}/{metric}": direction
            for name in self.evaluations
            for metric, direction in declared.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Consecutive rows of a data file, for a task that predicts them."""

    file: str
    """The file, as the user named it."""
    start: int
    """Number of the first of these rows, counted from 1, without a header."""
    records: Sequence[tuple[object, ...]]
    """The values of each row in the task's columns, in their order."""
    ids: Sequence[int | str] | None = None
    """The user's id of each row, ``None`` without an id column. The core adds it to the lines."""


class Task(Protocol):
    """A task: data, model and loss. It knows nothing of ranks, devices or strategies.

    For type checkers these two methods make a task; ``plugin.task.spec.TaskSpec`` lists all
    methods, in call order.
    """

    def prepare(self, config: RunConfig) -> Datasets:
        """Read, check and cache the data; called before ranks start, then on each
        rank, from the cache.

        Every rank must get the same rows in the same order. Raises DistcoreError for rows
        that cannot be used.
        """

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; the core has seeded the random state.

        On the meta device no weights are read; if it fails there, or gives values all the same,
        strategies that shard build the model whole instead. Raises DistcoreError where it cannot be
        built.
        """


def check_early(task: object, options: Mapping[str, Any]) -> None:
    """Raise DistcoreError for options in which the class of a task sees a slip at a glance.

    Called before torch is imported; ``task`` is ``None`` where the class cannot be asked.
    """
    check = getattr(task, "check_early", None)
    if check is not None:
        check(options)


def declared_metrics(task: object) -> Mapping[str, Direction]:
    """Return the declared metrics of a task or its class, by better direction; default: the loss.

    Raises TaskError for another type, and for a direction other than ``min`` and ``max``.
    """
    named = f"task {getattr(task, '__name__', type(task).__name__)}"
    declared: Mapping[str, Direction] = getattr(task, "metrics", {"loss": "min"})
    if not isinstance(declared, Mapping):
        raise TaskError(
            f"{named}: metrics is a {type(declared).__name__}, expected a dict such as {{'mae':"
            " 'min'}"
        )
    for name, direction in declared.items():
        if direction not in ("min", "max"):
            raise TaskError(f"{named}: metrics[{name!r}] = {direction!r}: expected 'min' or 'max'")
    return declared
