"""The lines before the first step, which describe the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from distcore.config import GIVEN
from distcore.model.dropout import has_dropout
from distcore.model.optim import warmup_steps
from distcore.model.running_statistics import FrozenStatistics, iterating_layers, tracking_layers
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.task import Datasets


def model_size(module: nn.Module) -> dict[str, int]:
    """Count the elements of all parameters and of trained parameters. The model may be
    on the meta device.
    """
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return {
        "parameters": sum(size for size, _ in sizes),
        "trained": sum(size for size, trained in sizes if trained),
    }


def rows_in_words(data: Datasets) -> str:
    """Return how many rows there are for what."""
    sets = [f"{len(rows):,} ({name})" for name, rows in data.evaluations.items()] or [
        f"{len(data.evaluation):,}"
    ]
    same = "the same" if len(sets) == 1 else "the first"
    tested = same if data.test is data.evaluation else f"{len(data.test):,}"
    return (
        f"{len(data.train):,} to train on, {' and '.join(sets)} to evaluate on, {tested} to test on"
    )


def overview(run: Run, data: Datasets) -> Iterator[str]:
    """Yield the lines; each begins with its subject."""
    config, facts = run.config, data.facts
    source, classes = (
        facts.get("source", facts.get("data")),
        facts.get("classes", facts.get("tags")),
    )
    count = len(classes) if isinstance(classes, list | tuple) else classes
    task = config.task.removeprefix(GIVEN).removeprefix(f"{Path.cwd()}{os.sep}")
    yield f"task:   {task}{f', {count} classes' if isinstance(count, int) else ''}"
    yield f"rows:   {rows_in_words(data)}{f', of {source}' if isinstance(source, str) else ''}"
    size, name = run.facts["model"], config.task_options.get("model")
    trained = (
        "" if size["trained"] == size["parameters"] else f", {size['trained']:,} of them trained"
    )
    kind = type(run.module).__name__
    named = f"{name} ({kind})" if isinstance(name, str) else kind
    yield (
        f"model:  {named}, {size['parameters']:,}"
        f" parameter{'s' * (size['parameters'] != 1)}{trained}"
    )
    ranks = (
        f"{run.world.size} rank{'s' * (run.world.size > 1)} ({config.strategy}) on"
        f" {run.world.device.type}"
    )
    yield f"ranks:  {ranks}, in {config.precision}"
    yield from _notes(run)
    epochs = f"{run.total_steps / max(1, run.steps_per_epoch):.3g}"
    ends = (
        f" (max_steps, not epochs {config.epochs})"
        if config.max_steps and config.epochs > 1
        else ""
    )
    ends += (
        ", all of them warm-up"
        if warmup_steps(config, run.total_steps) >= max(1, run.total_steps)
        else ""
    )
    if run.rows < config.global_batch_size:
        ends += f", each of all {run.rows} rows, which are fewer"
    judged = run.total_steps // max(1, run.steps_per_epoch) * config.eval_at_epoch_end
    judged += run.total_steps // config.eval_every if config.eval_every else 0
    ends += (
        f", too few evaluations for --patience {config.patience}"
        if judged <= config.patience > 0
        else ""
    )
    yield (
        f"steps:  {run.total_steps:,} of {config.global_batch_size} rows, {epochs}"
        f" epoch{'s' * (epochs != '1')}{ends}"
    )


def _notes(run: Run) -> Iterator[str]:
    """Yield a line for each kind of layer whose results depend on how the rows of a step are
    cut, or are frozen.
    """
    is_cut = run.world.shards * run.accumulation > 1
    layers = [layer for _, layer in tracking_layers(run.module)]
    frozen = [layer for layer in layers if isinstance(layer, FrozenStatistics)]
    torchs = [
        part
        for part in run.module.modules()
        if isinstance(part, _BatchNorm) and not hasattr(part, "is_global")
    ]
    if is_cut and set(torchs) - set(frozen):
        yield (
            "note:   batch normalization mixes the rows of a micro-batch: results depend on ranks"
            " and micro-batches"
        )
    if is_cut and any(isinstance(layer, _InstanceNorm) for layer in set(layers) - set(frozen)):
        yield (
            "note:   running statistics of instance normalization take the main rank's rows, once"
            " in each micro-batch: evaluations depend on ranks and micro-batches"
        )
    if run.accumulation > 1 and (path := next(iterating_layers(run.module), None)) is not None:
        # Ranks iterate alike, from the same weight, so with one micro-batch it is
        # as in one process.
        where = f"{path!r}" if path else "the model"
        yield (
            f"note:   the spectral norm of {where} makes a power iteration in each of up to"
            f" {run.accumulation} micro-batches of a step, not one: results depend on micro-batches"
        )
    if frozen:
        where = "all" if len(frozen) == len(layers) else f"{len(frozen)} of {len(layers)}"
        yield (
            f"note:   {where} normalizations with running statistics are frozen: these stay, and"
            " normalize the rows"
        )
    if run.base and layers:
        yield (
            f"note:   running statistics of the frozen base go on with the rows, in {len(layers)}"
            " layers"
        )
    if is_cut and run.config.dropout_masks == "rank" and has_dropout(run.module):
        yield (
            "note:   dropout masks follow from the rank, not from the row: results depend on ranks"
            " and micro-batches"
        )
