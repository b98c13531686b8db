"""``distcore train --dry-run``: the resolved config, and what each rank would do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import torch

from distcore.config import RunConfig, dump_config
from distcore.engine.trainer import total_steps_of
from distcore.errors import DistcoreError
from distcore.launchers.processes.available_cores import available_cores
from distcore.launchers.processes.cores import crowded, threads_per_rank
from distcore.model.model_source import model_source
from distcore.model.optim import freeze, optimizer_factory, with_warmup
from distcore.plugin.batching.sampling import BatchPlan, training_plan
from distcore.plugin.strategy.memory import PlansMemory
from distcore.plugin.task.task import Datasets
from distcore.rank_environment import join
from distcore.resolve.micro_batches import description
from distcore.resolve.resolve import build_strategy, load_task


def describe(config: RunConfig, data: Datasets) -> str:
    """Return the resolved config as YAML for ``distcore train``, and below it, in comments, the work of each rank."""
    total_steps = total_steps_of(config, len(data.train))
    lines = _lines(config, data, total_steps)
    return dump_config(with_warmup(config, total_steps)) + "\n".join(f"# {line}" for line in lines)


def _lines(config: RunConfig, data: Datasets, total_steps: int) -> Iterator[str]:
    plan = training_plan(config, data.train)
    ranks = int(config.nproc)
    sizes = f"{len(data.train)} to train on, {len(data.evaluation)} to evaluate, {len(data.test)} to test"
    joined = join(os.environ) is not None
    warnings = [*data.warnings, None if joined else crowded(config)]
    yield from (f"warning: {warning}" for warning in warnings if warning)
    yield f"run folder: {config.out}"
    yield f"rows: {sizes}"
    threads = torch.get_num_threads() if joined else threads_per_rank(ranks)
    yield f"threads: {threads} per rank, of {available_cores()} core(s) here"
    yield description(config)
    yield from _memory(config, data)
    yield f"steps: {plan.steps} per epoch, {total_steps} in all, of {config.global_batch_size} rows each"
    for rank in range(ranks):
        yield f"rank {rank} on {_device(config, rank)}: {_first_step(plan, rank, ranks)}"


def _memory(config: RunConfig, data: Datasets) -> Iterator[str]:
    """Yield what each rank holds of the states, where the strategy says it of a model without weights."""
    strategy = build_strategy(config)
    if not isinstance(strategy, PlansMemory):
        return
    with suppress(DistcoreError):
        skeleton = model_source(config, load_task(config), data).skeleton()
        freeze(config, skeleton)
        held = strategy.plan_memory(config, skeleton, int(config.nproc), optimizer_factory(config))
        what = "parameters, gradients and optimizer state"
        yield f"memory: {held.states / 2**20:,.1f} MiB per rank for {what}; distcore plan says what activations add"


def _first_step(plan: BatchPlan, rank: int, ranks: int) -> str:
    micros = plan.split(0, 0, rank, ranks)
    rows = ", ".join("0" if micro.is_padding else str(len(micro.indices)) for micro in micros)
    return f"micro-batches of its first step: {len(micros)}, of {rows} rows"


def _device(config: RunConfig, rank: int) -> str:
    return config.device if config.device == "cpu" else f"{config.device}:{rank}"
