"""Evaluation: every row exactly once, back in the order of the dataset (law 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from distcore.data.loader import MicroBatches, to_device
from distcore.engine.precision import autocast_for
from distcore.errors import AgreementError
from distcore.plugin.contract import Evaluation, Run
from distcore.plugin.hooks import Hooks
from distcore.plugin.sampling import evaluation_plan
from distcore.plugin.task import Dataset, Datasets, Task


def evaluate(run: Run, hooks: Hooks, task: Task, dataset: Dataset, data: Datasets) -> Evaluation:
    """Run ``task.outputs`` over ``dataset`` on all ranks; return the same result on every rank.

    ``data`` are the run's datasets, which the task's report may need. Raises AgreementError if a row comes back twice
    or not at all, because the strategy's sampler or gather is wrong.
    """
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
        metrics=task.report(outputs, data),
        evaluated=evaluated,
        unique=unique,
        dataset_size=len(dataset),
    )


@torch.no_grad()
def forward_all(run: Run, hooks: Hooks, task: Task, dataset: Dataset) -> dict[str, Tensor]:
    """Return the outputs of this rank's rows, ``(n_r, …)`` by name, and the row numbers as ``index``, ``(n_r,)``.

    Every rank runs the same number of forward passes, as sharded parameters need; padding rows are dropped, and
    so are the rows of a rank that does not speak for its data shard.
    """
    plan = evaluation_plan(run, dataset)
    sampler = hooks.build_sampler(run, plan)
    autocast = autocast_for(run.config, run.capabilities, run.world)
    parts: dict[str, list[Tensor]] = {}
    counts = run.world.speaks
    run.model.eval()
    for micro, batch in MicroBatches(dataset, sampler, run.config).stream(epoch=0, steps=range(plan.steps)):
        batch = to_device(batch, run.world.device)
        with autocast:
            outputs = task.outputs(run.model, batch)
        index = torch.from_numpy(micro.indices).to(run.world.device)
        for name, tensor in (outputs | {"index": index}).items():
            parts.setdefault(name, []).append(tensor if counts and not micro.is_padding else tensor[:0])
    run.model.train()
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
