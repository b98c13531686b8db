"""Evaluation: every row exactly once, back in the order of the dataset (law 4)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from distcore.data.loader import MicroBatches, to_device
from distcore.distributed.agreement import share_buffers
from distcore.engine.precision import autocast_for
from distcore.errors import AgreementError, TaskError
from distcore.plugin.contract import Evaluation, Run
from distcore.plugin.hooks import Hooks
from distcore.plugin.sampling import evaluation_plan
from distcore.plugin.task import Dataset, Datasets, Task


def evaluate(run: Run, hooks: Hooks, task: Task, dataset: Dataset, data: Datasets) -> Evaluation:
    """Run ``task.outputs`` over ``dataset`` on all ranks; return the same result on every rank.

    ``data`` are the run's datasets, which the task's report may need. Raises AgreementError if a row comes back twice
    or not at all, because the strategy's sampler or gather is wrong.
    """
    share_buffers(run, hooks)
    outputs = hooks.gather_outputs(run, forward_all(run, hooks, task, dataset))
    index = outputs.pop("index", torch.empty(0, dtype=torch.long))  # missing if the dataset has no rows
    order = torch.argsort(index)
    evaluated, unique = len(index), len(torch.unique(index))
    if not evaluated == unique == len(dataset):
        raise AgreementError(
            f"strategy {hooks.name!r}: evaluation returned {evaluated} rows, {unique} of them different, "
            f"for a dataset of {len(dataset)}"
        )
    outputs = {name: tensor[order].cpu() for name, tensor in outputs.items()}
    return Evaluation(
        outputs=outputs,
        metrics={name: _plain(value) for name, value in task.report(outputs, data).items()},
        evaluated=evaluated,
        unique=unique,
        dataset_size=len(dataset),
    )


def rehearse(run: Run, hooks: Hooks, task: Task, dataset: Dataset) -> None:
    """Evaluate one micro-batch on every rank and forget it, so that a task that cannot be evaluated fails at once.

    Raises TaskError before the first step rather than after the last.
    """
    if len(dataset):
        forward_all(run, hooks, task, dataset, steps=1)


@torch.no_grad()
def forward_all(run: Run, hooks: Hooks, task: Task, dataset: Dataset, steps: int | None = None) -> dict[str, Tensor]:
    """Return the outputs of this rank's rows, ``(n_r, …)`` by name, and the row numbers as ``index``, ``(n_r,)``.

    Every rank runs the same number of forward passes, as sharded parameters need; padding rows are dropped, and
    so are the rows of a rank that does not speak for its data shard. ``steps``: only so many of the first passes.
    Outputs wait on the CPU, so that the device need not hold those of a whole data set beside the model. Raises
    TaskError for outputs of a wrong shape.
    """
    plan = evaluation_plan(run, dataset)
    sampler = hooks.build_sampler(run, plan)
    autocast = autocast_for(run.config, run.capabilities, run.world)
    parts: dict[str, list[Tensor]] = {}
    counts = run.world.speaks
    run.model.eval()
    for micro, batch in MicroBatches(dataset, sampler, run.config).stream(epoch=0, steps=range(plan.steps)[:steps]):
        batch = to_device(batch, run.world.device)
        with autocast:
            outputs = task.outputs(run.model, batch)
        for name, tensor in (outputs | {"index": torch.from_numpy(micro.indices)}).items():
            _check_rows(name, tensor, len(micro.indices))
            parts.setdefault(name, []).append((tensor if counts and not micro.is_padding else tensor[:0]).cpu())
    run.model.train()
    return {name: _joined(name, tensors).to(run.world.device) for name, tensors in parts.items()}


def _check_rows(name: str, tensor: object, rows: int) -> None:
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise TaskError(f"task: outputs() returned {kind} as {name!r}; expected a tensor ({rows}, …)")
    if tensor.dim() == 0 or len(tensor) != rows:
        shape = tuple(tensor.shape)
        raise TaskError(f"task: outputs() returned {name!r} of shape {shape} for {rows} rows; expected ({rows}, …)")


def _joined(name: str, tensors: list[Tensor]) -> Tensor:
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        raise TaskError(
            f"task: outputs() returned {name!r} with rows of shapes {found}; rows of a data set have one shape: "
            "pad them to a fixed length, or return a number per row"
        )
    return torch.cat(tensors)


def _plain(value: object) -> object:
    """A metric as a Python number where it is a number of numpy or a tensor without dimensions."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        return value.item()
    return value
