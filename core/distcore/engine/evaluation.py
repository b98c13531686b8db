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
    """Run ``task.outputs`` over ``dataset`` on all ranks; the same answer on every rank.

    Raises AgreementError if a row came back twice or not at all: the strategy's sampler or gather is wrong.
    """
    outputs = hooks.gather_outputs(run, forward_all(run, hooks, task, dataset))
    index = outputs.pop("index", torch.empty(0, dtype=torch.long))
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
    """Outputs of this rank's rows with their ``index``; as many forwards on every rank.

    Padding is cut away, and so is what a rank computed that does not speak for its data shard.
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
