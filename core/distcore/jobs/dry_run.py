"""``distcore train --dry-run``: the resolved config, and the work of each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from distcore.config import RunConfig, dump_config
from distcore.engine.overview import rows_in_words
from distcore.launchers.processes.cores import available_cores, crowding_warning, threads_per_rank
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.task.task import Datasets
from distcore.rank_environment import join
from distcore.resolve.complete import complete, size_notes, total_steps_of
from distcore.resolve.micro_batches import description
from distcore.resolve.resolve import Resolved


def describe(resolved: Resolved, data: Datasets) -> str:
    """Return the completed config as YAML for ``distcore train``, and below it, in comments, the
    work of each rank.
    """
    completed = complete(resolved, data)
    return dump_config(completed.config) + "\n".join(
        f"# {line}" for line in _lines(completed, data)
    )


def _lines(completed: Resolved, data: Datasets) -> Iterator[str]:
    """Yield what a run would do: warnings, folder, rows, threads, steps and each rank's first."""
    config = completed.config
    plan = training_plan(config, data.train)
    ranks = int(config.nproc)
    joined = join(os.environ) is not None
    total_steps = total_steps_of(config, len(data.train))
    yield from (f"warning: {warning}" for warning in data.warnings)
    for note in size_notes(config, len(data.train), total_steps):
        yield f"warning: {note}"
    # Ranks of another launcher run on other machines, too.
    crowded = None if joined else crowding_warning(config)
    if crowded:
        yield f"warning: {crowded}"
    yield f"run folder: {config.out}"
    yield f"rows: {rows_in_words(data)}"
    threads = torch.get_num_threads() if joined else threads_per_rank(ranks)
    threads = config.threads or threads
    yield f"threads: {threads} per rank; this machine has {available_cores()} core(s)"
    yield description(config, data)
    steps = f"{plan.steps} per epoch, {total_steps} in total"
    yield f"steps: {steps}, {config.global_batch_size} rows each"
    for rank in range(ranks):
        micros = plan.split(0, 0, rank, ranks)
        sizes = [0 if micro.is_padding else len(micro.indices) for micro in micros]
        rows = ", ".join(map(str, sizes))
        step = f"first step has {len(micros)} micro-batch(es), of {rows} rows"
        yield f"rank {rank} on {_device(config, rank)}: {step}"


def _device(config: RunConfig, rank: int) -> str:
    return config.device if config.device == "cpu" else f"{config.device}:{rank}"
