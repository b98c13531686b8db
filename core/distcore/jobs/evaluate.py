"""Evaluate a checkpoint under any strategy, with any number of ranks."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distcore import checkpoint
from distcore.checkpoint.choice import choose
from distcore.checkpoint.job_state import fingerprint, saved_config
from distcore.checkpoint.row_content import RowContent
from distcore.checkpoint.surroundings import check_rows, check_task_files, warn_of_changed_sources
from distcore.config import GIVEN, RunConfig, load_config
from distcore.distributed.agreement import check_world
from distcore.distributed.arithmetic import arithmetic_of, attention_of
from distcore.engine.evaluation import evaluate_all
from distcore.engine.inner_gradients import refuse_inner_gradients
from distcore.engine.mixed_devices import explain_mixed_devices
from distcore.engine.trainer import set_up
from distcore.engine.training import Training
from distcore.files import strict_json
from distcore.jobs.logs import set_up_logging
from distcore.jobs.train import errors_of_job, resolve_here, show_evaluation
from distcore.launchers import launch
from distcore.launchers.processes.failures import run_as_rank
from distcore.plugin.batching.token_budget import SIZELESS
from distcore.plugin.strategy.contract import RankInfo, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import Datasets
from distcore.rank_environment import join
from distcore.resolve import tasks
from distcore.resolve.resolve import Resolved


def run(
    target: Path,
    changes: dict[str, Any],
    nproc: int,
    as_json: bool,
    step: int | None = None,
    best: bool = False,
) -> None:
    """Evaluate as one of the ranks that a launcher started, or start ``nproc``
    ranks; print the result.

    ``target``: a run folder or a checkpoint. ``changes``: values by dotted key that override
    the config of the
    training run. ``as_json``: print JSON instead of a report. ``step`` or ``best`` choose a
    checkpoint of a run folder, by default the newest. Raises DistcoreError.
    """
    rank_info = join(os.environ)
    path, chosen = choose(target, step, best)
    config = config_for(path, rank_info.size if rank_info else nproc, changes)
    rank = partial(evaluate_rank, config, path, chosen, as_json)
    if rank_info is not None:
        run_as_rank(rank, errors_of_job(), rank_info.rank, rank_info.size)
        return
    resolved = resolve_here(config, training=False)
    # errors in config and data come before ranks start
    data = resolved.task.prepare(resolved.config)
    _check_rows(resolved.config, path, data)
    if nproc == 1:
        rank()
    else:
        launch(rank, nproc=nproc)


def evaluate_rank(config: RunConfig, path: Path, chosen: str, as_json: bool) -> None:
    """Evaluate the checkpoint ``path`` in one rank; the main rank prints which was
    ``chosen``, and the report.
    """
    rank_info = join(os.environ) or RankInfo()
    resolved = resolve_here(config, training=False)
    set_up_logging(config, rank_info.rank)
    if rank_info.rank == 0:
        print(f"evaluating {chosen}", file=sys.stderr)
    report = evaluate_as_rank(resolved, rank_info, path)
    if rank_info.rank:
        return
    if as_json:
        print(strict_json(report))
        return
    sets = {f"{path.name}, {name}": one for name, one in report["evaluations"].items()}
    if report["evaluation"] not in sets.values():
        show_evaluation(path.name, report["evaluation"])
    for what, one in sets.items():
        show_evaluation(what, one)


def evaluate_as_rank(resolved: Resolved, rank_info: RankInfo, path: Path) -> dict[str, Any]:
    """Evaluate a checkpoint as one rank; every rank calls and gets the same report."""
    hooks, world = set_up(resolved, rank_info)
    with arithmetic_of(resolved.config), refuse_inner_gradients(hooks):
        report = _evaluate_in(world, resolved, hooks, rank_info, path)
    hooks.teardown(world)
    return report


def _evaluate_in(
    world: World, resolved: Resolved, hooks: Hooks, rank_info: RankInfo, path: Path
) -> dict[str, Any]:
    """Evaluate inside the process group. A function of its own, so that the run
    is freed before teardown.
    """
    config = resolved.config
    task = resolved.task
    data = task.prepare(config)
    _check_rows(config, path, data)
    training = Training.to_evaluate(config, hooks, world, task, data)
    run, data = training.run, training.data
    if config.task_options.get("test_data"):  # these rows, and no evaluation set
        data = replace(data, evaluations={})
    check_world(run, hooks, rank_info)
    if world.is_main:
        warn_of_changed_sources(path, checkpoint.Checkpoint(path).job_state(), config)
    weights = checkpoint.load_weights(run, hooks, path)
    with explain_mixed_devices(run, hooks), attention_of(world.device, data.test.lengths):
        evaluation = evaluate_all(run, hooks, task, data)
    return {
        "checkpoint": str(path),
        "weights": weights,
        "strategy": hooks.name,
        "world_size": world.size,
        "evaluation": evaluation.summary(),
        "evaluations": {name: one.summary() for name, one in evaluation.sets.items()},
    }


def _check_rows(config: RunConfig, path: Path, data: Datasets) -> None:
    # a task given as an object may have rows to evaluate alone
    if not config.task.startswith(GIVEN):
        job_state = checkpoint.Checkpoint(path).job_state()
        check_task_files(path, job_state)
        check_rows(path, job_state, config, fingerprint(data.train), RowContent(data.train, 0))


def config_for(path: Path, nproc: int, changes: dict[str, Any]) -> RunConfig:
    """Return the config that is stored in the checkpoint, with ``changes``, for an
    evaluation by ``nproc`` ranks.

    The global batch size follows from the number of ranks, so that every number is possible.
    """
    trained = saved_config(checkpoint.Checkpoint(path).job_state(), path).model_dump(mode="json")
    tasks.check_name(trained["task"], changes.get("task"))
    elsewhere = {
        "nproc": nproc,
        "resume": None,
        "extensions": {"progress": False, "metrics": False},
    }
    # the options in the checkpoint are those of the strategy that trained
    if "strategy" in changes:
        elsewhere["strategy_options"] = {}
    given = trained | elsewhere | changes
    size = load_config(None, given).micro_batch_size
    return load_config(
        None, given | {"global_batch_size": (SIZELESS if size == "auto" else size) * nproc}
    )
