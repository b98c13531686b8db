"""Evaluating a checkpoint, under any strategy and at any world size."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from distcore import checkpoint
from distcore.agreement import check_world
from distcore.config import RunConfig, load_config, parse_settings
from distcore.contract import Place, Task
from distcore.errors import CheckpointError
from distcore.evaluation import evaluate
from distcore.job import errors_of_job, show_evaluation
from distcore.launch import join, launch, run_as_rank
from distcore.logs import set_up_logging
from distcore.resolve import resolve
from distcore.trainer import build_run, load_task, set_up


def run(arguments: argparse.Namespace) -> int:
    """Join the ranks that a launcher started, or start them; raises DistcoreError."""
    place = join(os.environ)
    path, file = find(Path(arguments.target))
    changes = {"strategy": arguments.strategy} | parse_settings(arguments.set)
    if arguments.data:
        changes["test_data"] = arguments.data
    config = config_for(file, place.size if place else arguments.nproc, changes)
    rank = partial(evaluate_rank, config, path, arguments.json)
    if place is not None:
        run_as_rank(rank, errors_of_job(), place.rank, place.size)
        return 0
    load_task(config).prepare(resolve(config))  # what is wrong is said before ranks start
    if arguments.nproc == 1:
        rank()
    else:
        launch(rank, nproc=arguments.nproc)
    return 0


def evaluate_rank(config: RunConfig, path: Path, as_json: bool) -> None:
    """What each rank does; the main one prints."""
    rank = (join(os.environ) or Place()).rank
    set_up_logging(config, rank)
    report = evaluate_checkpoint(config, path)
    if rank:
        return
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        show_evaluation(path.name, report["evaluation"])


def evaluate_checkpoint(config: RunConfig, path: Path, task: Task | None = None) -> dict[str, Any]:
    """Evaluate the weights at ``path`` on the test rows of ``config``; the same answer on every rank.

    Runs in the ranks that a launcher started, or alone. Raises DistcoreError, one line.
    """
    place = join(os.environ) or Place()
    config = resolve(config, place.size, place.launcher)
    task = task or load_task(config)
    hooks, world = set_up(config, place)
    data = task.prepare(config)
    run = build_run(config, hooks, world, task, data, training=False)
    check_world(run, hooks, place)
    checkpoint.load_weights(run, hooks, path)
    evaluation = evaluate(run, hooks, task, data.test, data)
    hooks.teardown(world)
    return {
        "checkpoint": str(path),
        "strategy": hooks.name,
        "world_size": world.size,
        "evaluation": evaluation.summary(),
    }


def find(target: Path) -> tuple[Path, Path]:
    """Return the checkpoint that ``target`` means (a run folder's newest, or itself) and its run's config.yaml."""
    path = target if (target / checkpoint.MANIFEST).is_file() else checkpoint.find("auto", target)
    if path is None:
        raise CheckpointError(f"{target}: holds no checkpoint; expected a run folder or a folder step-NNNNNNNN")
    config = path.parent.parent / "config.yaml"
    if not config.is_file():
        raise CheckpointError(f"{path}: no {config.name} in the run folder above it, which says what the model is")
    return path, config


def config_for(file: Path, nproc: int, changes: dict[str, Any]) -> RunConfig:
    """Return the run's config as ``nproc`` ranks evaluate it: any number can, whatever batch it trained with."""
    trained = load_config(str(file), {})
    elsewhere = {"nproc": nproc, "resume": None, "extensions": {"progress": False, "metrics": False}}
    if "strategy" in changes:
        elsewhere["strategy_options"] = {}
    config = load_config(str(file), elsewhere | changes)
    micro_batch = trained.micro_batch_size if config.micro_batch_size == "auto" else config.micro_batch_size
    return config.model_copy(update={"global_batch_size": int(micro_batch) * nproc, "micro_batch_size": micro_batch})
