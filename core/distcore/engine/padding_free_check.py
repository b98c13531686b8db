"""Padding-free rows are compared with padded ones once, before the first step."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from distcore.config import RunConfig
from distcore.distributed.agreement import broadcast_from_main
from distcore.engine.loader import to_device
from distcore.engine.mode import set_mode
from distcore.engine.precision import autocast_for
from distcore.errors import ConfigError
from distcore.plugin.batching.columns import read
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.datasets import padded_rows
from distcore.plugin.task.per_epoch import in_epoch
from distcore.plugin.task.task import Dataset, Datasets, Task
from distcore.resolve.complete import Completed
from distcore.resolve.padding_free import set_padding_free, why_unsupported, with_padding

log = logging.getLogger("distcore")

LEAST, MOST, TOKENS = 4, 8, 256
"""Rows whose losses are compared between the two forms: at least 4, up to 8 in so
many tokens, padding included.
"""
BOUNDS = {"fp32": 1e-6}
"""Largest difference of the losses relative to their mean, by precision."""
HALF = 2e-2
"""The same in half precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingFree:
    """The value of ``padding_free`` in the report."""

    on: bool
    """True if rows were computed without padding."""
    why: str = ""
    """The reason, if the user left it open."""
    difference: float | None = None
    """Largest difference from the losses with padding, relative to their
    mean; ``None``: not compared.
    """


def verify(run: Run, hooks: Hooks, completed: Completed, data: Datasets) -> tuple[Run, Datasets]:
    """Set the model to padded or padding-free rows; return the run and matching
    datasets. Every rank calls.

    Padding-free losses of some rows are compared with padded ones. If they differ, 'auto' goes back
    to padding and 'on' raises ConfigError.
    """
    config = run.config
    task = completed.task
    requested = completed.padding_free.requested
    why = completed.padding_free.why
    run = _with_facts(run, PaddingFree(on=not config.pads_rows, why=why))
    if config.pads_rows:
        if why and run.world.is_main and task.computes_padding_free:
            log.debug("padding-free: off: %s", why)
        return run, data
    padded = data.mapped(padded_rows)
    if padded is None:  # such as documents isolated inside one row: padding would join them
        return run, data
    rows = _some_rows(config, data.train)
    expected = _row_losses(run, task, padded.train, rows)
    undo = task.enable_padding_free(run.module)
    data = _select_logits(run, task, data)
    difference = _difference(expected, _row_losses(run, task, data.train, rows))
    # machines may round differently
    difference = float(broadcast_from_main(run, hooks, repr(difference)))
    bound = BOUNDS.get(config.precision, HALF)
    compared = (
        f"losses of {len(rows)} rows differ by {difference:.1e} from those with padding (bound:"
        f" {bound:.0e})"
    )
    if difference <= bound:
        if run.world.is_main:
            log.debug("padding-free: on%s; %s", f": {why}" if why else "", compared)
        return _with_facts(run, PaddingFree(on=True, why=why, difference=difference)), data
    if requested == "on":
        raise ConfigError(f"padding_free = 'on': {compared}; use --padding-free off")
    undo()
    if run.world.is_main:
        log.warning("padding-free: off: %s", compared)
    run = replace(run, config=with_padding(config, padded=True))
    return _with_facts(run, PaddingFree(on=False, why=compared, difference=difference)), padded


def restore(run: Run, task: Task, data: Datasets) -> tuple[Run, Datasets]:
    """Have the model of an evaluation compute rows as in its training, padded or not; return
    the run and matching datasets.
    """
    task = BoundTask.wrap(task)
    config = run.config
    padded = config.pads_rows or bool(why_unsupported(config, run.capabilities, task))
    run = replace(run, config=with_padding(config, padded))
    set_padding_free(run.config, task, run.module)
    if not padded or not task.computes_padding_free:  # otherwise the task decides for its data
        data = _select_logits(run, task, data)
    return run, data


def _with_facts(run: Run, facts: PaddingFree) -> Run:
    return replace(run, facts={**run.facts, "padding_free": asdict(facts)})


def _select_logits(run: Run, task: BoundTask, data: Datasets) -> Datasets:
    # it needs whole outputs of layers
    can = run.config.compile == "off" and run.capabilities.ranks_per_shard == 1
    return task.select_logits(run.module, data) if can else data


def _some_rows(config: RunConfig, dataset: Dataset) -> np.ndarray:
    """Return rows of the first step, int64, evenly spaced from the shortest to the longest."""
    rows = training_plan(config, dataset).rows(0, 0)
    lengths = read(dataset.lengths, rows)
    rows = rows[np.argsort(lengths, kind="stable")]
    longest = max(1, int(lengths.max()))
    # With few tokens to a micro-batch a device may have no memory for more.
    limit = (config.micro_batch_tokens or rows.size * longest) // longest
    wanted = max(LEAST, TOKENS // longest)
    count = max(1, min(MOST, wanted, limit, len(rows)))
    positions = np.linspace(0, len(rows) - 1, count).round().astype(int)
    evenly_spaced: np.ndarray = rows[positions]
    return evenly_spaced


@torch.no_grad()
def _row_losses(run: Run, task: BoundTask, dataset: Dataset, rows: np.ndarray) -> Tensor:
    """Return the loss of each of ``rows``, fp32 ``(n,)``, without dropout; every rank calls."""
    batch = to_device(in_epoch(dataset, 0).batch(rows), run.world.device)
    set_mode(run, training=False)
    # What is compiled for these rows alone would be wasted.
    eager: AbstractContextManager[object] = nullcontext()
    if run.config.compile != "off":
        eager = torch.compiler.set_stance("force_eager")
    with eager, autocast_for(run.config, run.capabilities, run.world):
        losses = task.losses.row_losses(run.model, batch)
    set_mode(run, training=True)
    return losses.float()


def _difference(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    scale = expected.abs().mean().item()
    difference = (expected - actual).abs().max().item()
    return difference / scale if scale else difference
