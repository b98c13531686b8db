"""The short path to a task of one's own: two datasets of torch, a model, and a loss per row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore.errors import TaskError
from distcore.plugin.batching.columns import ConstantColumn
from distcore.plugin.task.task import Batch, Datasets, Direction, Losses

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from distcore.config import RunConfig

SAMPLED = 64
"""Largest number of rows in the digest that is made at once; ``row_bytes`` covers all rows."""
OTHER_LOSSES = ("loss", "batch_loss", "phases", "train_step")
"""Methods of a task that needs no ``row_loss``."""


class Simple:
    """A task as ``data``, ``model`` and ``row_loss``; implements ``distcore.Task``.

    Make the subclass a frozen dataclass, and its fields are options. Every row counts one
    in the mean loss.
    """

    metrics: ClassVar[Mapping[str, Direction]] = {"loss": "min"}
    """Metrics of the report, with better direction; all but ``loss`` come from ``row_metrics``."""
    lr: ClassVar[float] = 1e-3
    """Peak learning rate of a run that does not set one."""

    def data(self) -> Sequence[Dataset[Any]]:
        """Return the rows for training, for evaluation and, optionally, for the final test.

        Each is a ``torch.utils.data.Dataset`` with a length. Row ``i`` must be the same in every
        process, each time. If rows differ between epochs, the method ``at(epoch)`` returns the
        dataset of an epoch.
        """
        raise TaskError(
            f"task {type(self).__name__}: has no data(), the rows to train on and to evaluate on"
        )

    def model(self) -> nn.Module:
        """Return the model in fp32. The random state is seeded before each call."""
        raise TaskError(f"task {type(self).__name__}: has no model(), the model to train")

    def row_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the loss of each row of ``batch``, floating point, shape ``(n,)``, with gradient.

        ``batch`` comes from ``collate``, on the device of ``model``. Use parameters only through
        ``model(...)``. Additional terms of the loss go into a dict next to it.
        """
        raise TaskError(
            f"task {type(self).__name__}: has no row_loss(model, batch), the loss of each row"
        )

    def row_metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the other metrics of each row, shape ``(n,)``; their means are reported.

        If ``loss`` is among them, ``row_loss`` is not called in evaluations, which
        spares a forward pass.
        """
        return {}

    def collate(self, rows: list[Any]) -> Batch:
        """Return rows of a dataset as a batch, as ``torch.utils.data.default_collate`` does."""
        from torch.utils.data import default_collate

        try:
            return default_collate(rows)
        except (AttributeError, TypeError, RuntimeError) as error:
            kinds = dict.fromkeys(
                str(tuple(getattr(row, "shape", ())) or type(row).__name__) for row in rows
            )
            reason: object = error
            if _has_none(rows):
                reason = "a row is None, or has it among its values"
            problem = f"rows of {', '.join(kinds)} make no batch ({reason}); write collate(rows)"
            raise TaskError(f"task {type(self).__name__}: {problem}") from error

    def suggest(self, config: RunConfig) -> dict[str, object]:
        """Return the learning rate of a run that does not set one."""
        return {"lr": self.lr}

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the datasets as the core needs them; TaskError for a missing length or method."""
        has_row_loss = type(self).row_loss is not Simple.row_loss
        if not has_row_loss and not any(hasattr(self, name) for name in OTHER_LOSSES):
            self.row_loss(None, None)  # type: ignore[arg-type]  # raises
        if type(self).model is Simple.model and type(self).build_model is Simple.build_model:
            self.model()  # raises
        data = self.data()
        if not isinstance(data, tuple | list) or not 2 <= len(data) <= 3:
            answer = type(data).__name__
            if hasattr(data, "__len__"):
                answer += f" of {len(data)}"
            raise TaskError(
                f"task {type(self).__name__}: data() returned {answer}; expected two or three"
                " datasets: return (train, evaluation) or (train, evaluation, test)"
            )
        sets = [given_rows(dataset, self) for dataset in data]
        train, evaluation, test = (*sets, sets[1])[:3]
        return Datasets(train=train, evaluation=evaluation, test=test)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets:
        """Return datasets without rows: the model is built from the options alone."""
        none = CollatedRows([], self)
        return Datasets(train=none, evaluation=none, test=none)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model."""
        return self.model()

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics of each row, the loss among them; shape ``(n,)`` each."""
        metrics = self.row_metrics(model, batch)
        if not isinstance(metrics, dict):  # the caller says so
            return metrics
        if (metrics.keys() ^ self.metrics.keys()) - {"loss"}:
            returned = sorted(metrics.keys() - {"loss"})
            declared = sorted(self.metrics.keys() - {"loss"})
            raise TaskError(
                f"task {type(self).__name__}: row_metrics() returned {returned}, and `metrics` of"
                f" the task declares {declared}: make them equal"
            )
        if "loss" in metrics:
            return metrics
        # With torch, which is slow to import.
        from distcore.plugin.task.losses import row_losses_alone

        return {"loss": row_losses_alone(self.row_loss, model, batch), **metrics}

    def report(self, outputs: Mapping[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return the mean of each metric over the rows; ``None`` without rows."""
        return {
            name: outputs[name].double().mean().item() if name in outputs else None
            for name in self.metrics
        }


def _has_none(rows: object) -> bool:
    """Return True if a row is None, or has it among its values."""
    from torch.utils._pytree import tree_leaves

    return any(leaf is None for leaf in tree_leaves(rows))


class CollatedRows:
    """The rows of a torch dataset, collated by a ``Simple`` task: a ``distcore.Dataset``."""

    def __init__(self, rows: Any, task: Simple) -> None:
        """``rows`` has a length and can be indexed."""
        self.rows = rows
        self._task = task
        self.lengths = self.items = ConstantColumn(len(rows), 1)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate the rows ``indices``, int64, shape ``(n,)``."""
        return self._task.collate([self.rows[index] for index in indices.tolist()])

    @property
    def content(self) -> str:
        """A digest of at most ``SAMPLED`` rows, evenly spaced over the dataset."""
        digest = hashlib.sha256(str(len(self)).encode())
        positions = np.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(int)
        rows = np.unique(positions).tolist()
        for part in self.row_bytes(rows, lambda array: repr(array).encode()):
            digest.update(part)
        return digest.hexdigest()

    def row_bytes(
        self,
        rows: Iterable[int] | None = None,
        of_array: Callable[[np.ndarray], bytes] = np.ndarray.tobytes,
    ) -> Iterator[bytes]:
        """Yield the values of each of ``rows``, by default all, as bytes.

        ``of_array`` gives the bytes of an array.
        """
        from torch import Tensor, uint8
        from torch.utils._pytree import tree_leaves

        for index in range(len(self)) if rows is None else rows:
            for leaf in tree_leaves(self.rows[index]):
                if isinstance(leaf, Tensor):
                    values = leaf.detach().cpu().contiguous().reshape(-1)
                    yield values.view(uint8).numpy().tobytes()
                elif isinstance(leaf, np.ndarray):
                    yield of_array(leaf)
                else:  # the repr of an image, for one, has its address
                    yield leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode()


class VaryingRows(CollatedRows):
    """The same for a dataset whose rows differ between epochs."""

    def __init__(self, rows: Any, task: Simple) -> None:
        """``rows.at(epoch)`` has a length and can be indexed."""
        super().__init__(rows.at(0), task)
        self._all = rows

    def at(self, epoch: int) -> CollatedRows:
        """Return the rows of ``epoch``, counted from 0."""
        return CollatedRows(self._all.at(epoch), self._task)


def given_rows(dataset: Any, task: Simple) -> CollatedRows:
    """Return a torch dataset in the core's form; raises TaskError for one without a length."""
    if hasattr(dataset, "at"):
        return VaryingRows(dataset, task)
    if not hasattr(type(dataset), "__len__") or not hasattr(type(dataset), "__getitem__"):
        raise TaskError(
            f"task {type(task).__name__}: data() returned a {type(dataset).__name__}, which cannot"
            " be indexed: a resume could not go on inside it (law 7); expected datasets with len()"
            " and rows by number"
        )
    if isinstance(dataset, tuple) and any(hasattr(part, "dtype") for part in dataset):
        raise TaskError(
            f"task {type(task).__name__}: data() returned tensors; make each set a TensorDataset of"
            " them"
        )
    return CollatedRows(dataset, task)
