"""The calls to a task: which of its methods are there, what stands in for those that are not, and what they returned.

Asking for a method by its protocol takes microseconds, so it is done once per phase and not in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from distcore.config import RunConfig
from distcore.errors import TaskError
from distcore.files import strict_json
from distcore.plugin.batching.columns import read
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.optional import (
    Generates,
    HasLoss,
    HasOutputs,
    HasWeights,
    Reports,
    RowLoss,
    Saves,
    Sums,
)
from distcore.plugin.task.outputs import Collected, checked_outputs
from distcore.plugin.task.ragged import Ragged
from distcore.plugin.task.task import Batch, Dataset, Datasets, Reopens, Task

Loss = Callable[[nn.Module, Batch], Tensor]
Evaluated = tuple[dict[str, Tensor | Ragged], Mapping[str, object]]
"""Outputs and sums of one micro-batch."""
Evaluate = Callable[[Batch, int], Evaluated]
"""What evaluates a micro-batch of so many rows."""


def prepare(task: Task, config: RunConfig) -> Datasets:
    """Return the task's data sets; raises TaskError if it lacks a method or a data set is only an iterator."""
    loss_of(task)
    _check_evaluates(task)
    data = task.prepare(config)
    if not isinstance(data, Datasets):
        raise TaskError(f"task: prepare() returned {type(data).__name__}; expected distcore.Datasets")
    for name in ("train", "evaluation", "test"):
        _check_indexed(name, getattr(data, name))
    return data


def loss_of(task: Task) -> Loss:
    """Return the task's ``loss``, or the sum of its ``row_loss``; raises TaskError if it has neither."""
    if isinstance(task, HasLoss):
        return task.loss
    if not isinstance(task, RowLoss):
        raise TaskError(f"task {type(task).__name__}: has neither loss() nor row_loss(); it needs one of them")
    row_loss = task.row_loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return _checked_losses(row_loss(model, batch)).sum()

    return loss


def evaluation_of(run: Run, task: Task, labelled: bool = True) -> Evaluate:
    """Return what evaluates a micro-batch; it raises TaskError for outputs of a wrong shape.

    Rows that are not ``labelled`` have outputs alone, no sums.
    """
    _check_evaluates(task)
    outputs = _outputs_of(task)
    generate = task.generate if isinstance(task, Generates) else None
    sums = task.sums if labelled and isinstance(task, Sums) else None
    in_step = run.capabilities.shards_parameters and run.world.size > 1
    compiled = run.compiled is not None and run.config.compile != "off"

    def evaluate(batch: Batch, rows: int) -> Evaluated:
        found = checked_outputs(outputs[0], outputs[1](run.model, batch), rows) if outputs else {}
        if generate:
            # Not compiled: what grows with each token would be compiled again and again.
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                made = checked_outputs("generate", generate(run.module, batch, in_step), rows)
            if twice := sorted(found.keys() & made.keys()):
                raise TaskError(
                    f"task: generate() returned {twice[0]!r}, which outputs() has, too; choose another name"
                )
            found |= made
        return found, sums(run.model, batch) if sums else {}

    return evaluate


def metrics_of(task: Task, found: Collected, dataset: Dataset, data: Datasets) -> dict[str, object]:
    """Return the metrics of a data set; raises TaskError for what is not JSON, or if one that is declared is missing.

    ``found`` holds outputs in the order of ``dataset``.
    """
    metrics: dict[str, object] = {}
    if isinstance(task, Reports) and _gives_outputs(task):
        metrics = _checked_metrics("report", task.report(found.outputs, data))
    elif _evaluates_its_loss(task):
        metrics = {"loss": _mean_loss(found.outputs, dataset)}
    if isinstance(task, Sums):
        others = _checked_metrics("report_sums", task.report_sums(found.sums, data))
        if twice := sorted(metrics.keys() & others.keys()):
            raise TaskError(f"task: report_sums() returned {twice[0]!r}, which report() has, too; choose another name")
        metrics |= others
    declared = getattr(task, "metrics", None)
    if isinstance(declared, Mapping) and (missing := sorted(declared.keys() - metrics.keys())):
        raise TaskError(f"task: the report lacks {missing[0]!r}, which `metrics` declares; it has {sorted(metrics)}")
    return metrics


def save(task: Task, folder: Path, config: RunConfig, data: Datasets) -> None:
    """Have the task write its files, if it has any."""
    if isinstance(task, Saves):
        task.save(folder, config, data)


def reopen(task: Task, folder: Path, config: RunConfig) -> Datasets | None:
    """Return data sets without rows from what ``save`` wrote into ``folder``; ``None`` where there are none.

    Raises TaskError if the task returns anything else.
    """
    data = task.reopen(folder, config) if isinstance(task, Reopens) else None
    if data is not None and not isinstance(data, Datasets):
        raise TaskError(f"task: reopen() returned {type(data).__name__}; expected distcore.Datasets or None")
    return data


def weights_folder(task: Task, config: RunConfig) -> Path | None:
    """Return the folder with the model's weights; ``None`` for a task that knows of none."""
    return task.weights_folder(config) if isinstance(task, HasWeights) else None


def data_of(task: Task, path: Path, config: RunConfig) -> Datasets:
    """Return the data sets with which the model of the checkpoint ``path`` can be built.

    They are without rows, from what the task saved in the run folder; where the checkpoint was moved out of it, the
    data of ``config`` are prepared.
    """
    return reopen(task, path.resolve().parent.parent, config) or prepare(task, config)


def _check_indexed(name: str, dataset: object) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__len__"):
        raise TaskError(
            f"task: prepare() returned as {name!r} a {type(dataset).__name__}, which is read from its start only: a "
            "resume could not go on inside it (law 7); expected a data set with len() and batch(indices)"
        )
    if not hasattr(type(dataset), "batch"):
        kind = type(dataset).__name__
        raise TaskError(f"task: prepare() returned as {name!r} a {kind}, which has no batch(indices)")


def _check_evaluates(task: Task) -> None:
    name = type(task).__name__
    if not (_gives_outputs(task) or isinstance(task, Sums)):
        raise TaskError(f"task {name}: has none of outputs(), sums() and row_loss(); an evaluation needs one of them")
    if not (isinstance(task, Reports | Sums) or _evaluates_its_loss(task)):
        raise TaskError(f"task {name}: has outputs but no report(), which makes metrics of them")


def _evaluates_its_loss(task: Task) -> bool:
    return isinstance(task, RowLoss) and not isinstance(task, HasOutputs | Sums)


def _gives_outputs(task: Task) -> bool:
    return isinstance(task, HasOutputs | Generates) or _evaluates_its_loss(task)


def _outputs_of(task: Task) -> tuple[str, Callable[[nn.Module, Batch], object]] | None:
    """Return what gives outputs, and its name."""
    if isinstance(task, HasOutputs):
        return "outputs", task.outputs
    if isinstance(task, RowLoss) and not isinstance(task, Sums):
        row_loss = task.row_loss
        return "row_loss", lambda model, batch: {"loss": _checked_losses(row_loss(model, batch))}
    return None


def _checked_losses(losses: Tensor) -> Tensor:
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        found = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise TaskError(f"task: row_loss() returned {found}; expected one loss per row, shape (n,)")
    return losses


def _mean_loss(outputs: dict[str, Tensor | Ragged], dataset: Dataset) -> float | None:
    """Return the mean over items, as in training; ``None`` where nothing counts."""
    items = int(read(dataset.items, np.arange(len(dataset))).sum())
    loss = outputs.get("loss")
    return loss.double().sum().item() / items if isinstance(loss, Tensor) and items else None


def _checked_metrics(method: str, metrics: object) -> dict[str, object]:
    if not isinstance(metrics, dict):
        raise TaskError(f"task: {method}() returned {type(metrics).__name__}; expected a dict of metrics by name")
    plain = {name: _plain(value) for name, value in metrics.items()}
    for name, value in plain.items():
        checked_json(f"{method}() as {name!r} returned {type(value).__name__}; expected a JSON value", value)
    return plain


def _plain(value: object) -> object:
    """A metric as a Python number where it is a number of numpy or a tensor without dimensions."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        return value.item()
    return value


def checked_json(complaint: str, value: object) -> str:
    """Return ``value`` as JSON text; raises TaskError, which begins with ``complaint``, for what is no JSON value."""
    try:
        return strict_json(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task: {complaint}: {error}") from error
