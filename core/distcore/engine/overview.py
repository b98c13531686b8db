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
from distcore.model.run_schedule import warmup_steps
from distcore.model.running_statistics import FrozenStatistics, iterating_layers, tracking_layers
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.task import Datasets


def model_size(module: nn.Module) -> dict[str, int]:
    """Count the elements of all parameters, and of trained ones; the model may be a meta model."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return {
        "parameters": sum(size for size, _ in sizes),
        "trained": sum(size for size, trained in sizes if trained),
    }


def rows_in_words(data: Datasets) -> str:
    """Return how many rows there are to train on, to evaluate on, and to test on."""
    sets = [f"{len(rows):,} ({name})" for name, rows in data.evaluations.items()]
    sets = sets or [f"{len(data.evaluation):,}"]
    tested = f"{len(data.test):,}"
    if data.test is data.evaluation:
        tested = "the same" if len(sets) == 1 else "the first"
    return (
        f"{len(data.train):,} to train on, {' and '.join(sets)} to evaluate on, {tested} to test on"
    )


def overview(run: Run, data: Datasets) -> Iterator[str]:
    """Yield the lines; each begins with its subject."""
    config = run.config
    task = config.task.removeprefix(GIVEN).removeprefix(f"{Path.cwd()}{os.sep}")
    yield f"task:   {task}{_classes(data)}"
    source = data.facts.get("source", data.facts.get("data"))
    of_source = f", of {source}" if isinstance(source, str) else ""
    yield f"rows:   {rows_in_words(data)}{of_source}"
    yield f"model:  {_model(run)}"
    ranks = f"{run.world.size} rank{'s' * (run.world.size > 1)}"
    device = run.world.device.type
    yield f"ranks:  {ranks} ({config.strategy}) on {device}, in {config.precision}"
    yield from _notes(run)
    yield f"steps:  {run.total_steps:,} of {config.global_batch_size} rows, {_epochs(run)}"


def _classes(data: Datasets) -> str:
    """Return how many classes or tags the task has; empty if it says none."""
    classes = data.facts.get("classes", data.facts.get("tags"))
    count = len(classes) if isinstance(classes, list | tuple) else classes
    return f", {count} classes" if isinstance(count, int) else ""


def _model(run: Run) -> str:
    """Return name and size of the model."""
    kind = type(run.module).__name__
    name = run.config.task_options.get("model")
    words = f"{name} ({kind})" if isinstance(name, str) else kind
    size = run.facts["model"]
    count = size["parameters"]
    words += f", {count:,} parameter{'s' * (count != 1)}"
    if size["trained"] != count:
        words += f", {size['trained']:,} of them trained"
    return words


def _epochs(run: Run) -> str:
    """Return how many epochs the steps are, with what may be unexpected about them."""
    config = run.config
    epochs = f"{run.total_steps / max(1, run.steps_per_epoch):.3g}"
    words = f"{epochs} epoch{'s' * (epochs != '1')}"
    if config.max_steps and config.epochs > 1:
        words += f" (max_steps, not epochs {config.epochs})"
    if warmup_steps(config, run.total_steps) >= max(1, run.total_steps):
        words += ", all of them warm-up"
    if run.rows < config.global_batch_size:
        words += f", each of all {run.rows} rows, which are fewer"
    evaluations = 0
    if config.eval_at_epoch_end:
        evaluations += run.total_steps // max(1, run.steps_per_epoch)
    if config.eval_every:
        evaluations += run.total_steps // config.eval_every
    if evaluations <= config.patience > 0:
        words += f", too few evaluations for --patience {config.patience}"
    return words


def _notes(run: Run) -> Iterator[str]:
    """Yield a line for each kind of layer whose results depend on how a step's rows are cut.

    And for layers whose statistics are frozen, or go on in a frozen base.
    """
    is_cut = run.world.shards * run.accumulation > 1
    layers = [layer for _, layer in tracking_layers(run.module)]
    frozen = [layer for layer in layers if isinstance(layer, FrozenStatistics)]
    not_frozen = set(layers) - set(frozen)
    all_batch_norms = [part for part in run.module.modules() if isinstance(part, _BatchNorm)]
    batch_norms = [part for part in all_batch_norms if not hasattr(part, "is_global")]
    if is_cut and set(batch_norms) - set(frozen):
        yield (
            "note:   batch normalization mixes the rows of a micro-batch: results depend on ranks"
            " and micro-batches"
        )
    if any(part.running_mean is None for part in all_batch_norms):
        yield (
            "note:   batch normalization without running statistics mixes the rows of a micro-batch"
            " in evaluation, too: metrics depend on ranks and micro-batches"
        )
    if is_cut and any(isinstance(layer, _InstanceNorm) for layer in not_frozen):
        yield (
            "note:   running statistics of instance normalization take the main rank's rows, once"
            " in each micro-batch: evaluations depend on ranks and micro-batches"
        )
    # Ranks iterate alike, from the same weight, so with one micro-batch it is as in one process.
    path = next(iterating_layers(run.module), None) if run.accumulation > 1 else None
    if path is not None:
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
