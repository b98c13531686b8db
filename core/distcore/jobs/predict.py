"""Predict the rows of a file, which need no labels, under any strategy, with
any number of ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distcore import checkpoint
from distcore.checkpoint.choice import choose
from distcore.checkpoint.manifest import MANIFEST
from distcore.checkpoint.surroundings import check_task_files, warn_of_changed_sources
from distcore.config import RunConfig
from distcore.distributed.agreement import (
    broadcast_from_main,
    check_agreed,
    check_world,
    on_all_ranks,
)
from distcore.distributed.arithmetic import arithmetic_of, attention_of
from distcore.engine.evaluation import collect
from distcore.engine.mixed_devices import explain_mixed_devices
from distcore.engine.trainer import set_up
from distcore.engine.training import Training
from distcore.errors import DataError
from distcore.jobs import prediction_rows
from distcore.jobs.evaluate import config_for
from distcore.jobs.logs import set_up_logging
from distcore.jobs.prediction_file import PredictionFile
from distcore.jobs.train import errors_of_job, resolve_here
from distcore.launchers import launch
from distcore.launchers.processes.failures import run_as_rank
from distcore.plugin.strategy.contract import RankInfo, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Datasets, FileRows, Outputs, Task
from distcore.rank_environment import join
from distcore.resolve.resolve import Resolved

log = logging.getLogger("distcore")
WINDOW = 32
"""Micro-batches per rank that are held in memory and written together."""
SECONDS_BETWEEN_LINES = 10
"""Seconds from one line about the progress to the next."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The rows to predict, the checkpoint, and the output file."""

    config: RunConfig
    """The checkpoint's config, for these ranks."""
    path: Path
    """The checkpoint."""
    file: Path
    """The rows: a file, or a folder."""
    id_column: str | None
    """The column that names each row in its line."""
    rows: int
    """Their number."""
    out: PredictionFile
    """The lines."""

    def windows(self, task: BoundTask, skip: int = 0) -> Iterator[FileRows]:
        """Yield the rows after the first ``skip``, as many at a time as fit into memory."""
        size = WINDOW * self.config.global_batch_size
        return prediction_rows.windows(task, self.file, self.id_column, size, skip)


def run(
    target: Path,
    file: Path,
    out: Path,
    changes: dict[str, Any],
    nproc: int,
    step: int | None = None,
    best: bool = False,
    id_column: str | None = None,
) -> None:
    """Predict as one of the ranks that a launcher started, or start ``nproc`` ranks; write
    the lines to ``out``.

    ``target``: a run folder or a checkpoint. ``changes``: values by dotted key that override the
    config of the training run. ``step`` or ``best`` choose a checkpoint of a run folder, by default
    the newest. ``id_column`` names each row in its line. Raises DistcoreError.
    """
    rank_info = join(os.environ)
    path, chosen = choose(target, step, best)
    if rank_info is None or rank_info.rank == 0:
        print(f"predicting with {chosen}", file=sys.stderr)
    config = config_for(path, rank_info.size if rank_info else nproc, changes)
    checked = partial(check, config, path, file, out, id_column=id_column)
    if rank_info is not None:

        def check_and_predict() -> None:
            predict_and_say(checked())

        run_as_rank(check_and_predict, errors_of_job(), rank_info.rank, rank_info.size)
    elif nproc == 1:
        predict_and_say(checked())
    else:
        launch(predict_and_say, checked(), nproc=nproc)


def check(
    config: RunConfig,
    path: Path,
    file: Path,
    out: Path,
    task: Task | None = None,
    id_column: str | None = None,
) -> Prediction:
    """Read and check all rows once, and an unfinished ``out``; writes nothing.

    Raises DistcoreError.
    """
    resolved = resolve_here(config, training=False, task=task)
    predicting = resolved.task
    predicting.predictions.check_without_labels(resolved.config.task)
    facts: dict[str, object] = {
        "checkpoint": hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest(),
        "data file": prediction_rows.content(file),
        "id column": id_column,
        "task": resolved.config.task,
        "task option": resolved.config.task_options,
    }
    # Lines that an earlier attempt has written count only if all of these are the same.
    lines = PredictionFile(out, facts)
    prediction = Prediction(
        config=config, path=path, file=file, id_column=id_column, rows=0, out=lines
    )
    lines.check()
    job_state = checkpoint.Checkpoint(path).job_state()
    check_task_files(path, job_state)
    warn_of_changed_sources(path, job_state, resolved.config)
    data = predicting.data_of(path, resolved.config)
    # Before any rank starts: a row that cannot be used must not end the job hours later.
    rows = 0
    for window in prediction.windows(predicting):
        rows += len(predicting.predictions.unlabeled(window, data).test)
    if not rows:
        raise DataError(f"data file {file}: holds no rows")
    return replace(prediction, rows=rows)


def predict_rank(prediction: Prediction, task: Task | None = None) -> None:
    """Predict in one rank; the main rank writes. ``task`` replaces the config's.

    Raises DistcoreError.
    """
    rank_info = join(os.environ) or RankInfo()
    set_up_logging(prediction.config, rank_info.rank)
    resolved = resolve_here(prediction.config, training=False, task=task)
    hooks, world = set_up(resolved, rank_info)
    try:
        with arithmetic_of(resolved.config):
            _predict_in(world, resolved, hooks, rank_info, prediction)
    finally:
        prediction.out.close()
    hooks.teardown(world)


def predict_and_say(prediction: Prediction) -> None:
    """Predict in one rank; the main rank also says what it wrote."""
    predict_rank(prediction)
    rank_info = join(os.environ)
    if rank_info is None or rank_info.rank == 0:
        print(f"predicted {prediction.rows} rows: {prediction.out.out}", flush=True)


def _predict_in(
    world: World, resolved: Resolved, hooks: Hooks, rank_info: RankInfo, prediction: Prediction
) -> None:
    """Predict inside the process group. A function of its own, so that the run
    is freed before teardown.
    """
    config = resolved.config
    task = resolved.task
    data = task.data_of(prediction.path, config)
    out = prediction.out
    training = Training.to_evaluate(config, hooks, world, task, data)
    run, data = training.run, training.data
    check_world(run, hooks, rank_info)
    # Ranks on other machines read files of their own.
    check_agreed(run, hooks, **out.facts)
    checkpoint.load_weights(run, hooks, prediction.path)
    failed = f"--out {out.out} cannot be written"
    lines_so_far = on_all_ranks(run, hooks, failed, out.begin if world.is_main else None)
    # Only the main rank has the file; all must skip the same rows.
    done = int(broadcast_from_main(run, hooks, str(lines_so_far or 0)))
    if done and world.is_main:
        log.info("%s has %d of %d rows: going on behind them", out.part, done, prediction.rows)
    evaluate_batch = task.evaluation.of_run(run, labeled=False)
    last_line = time.monotonic()
    for rows in prediction.windows(task, skip=done):
        named = task.predictions.unlabeled(rows, data)
        with explain_mixed_devices(run, hooks), attention_of(world.device, data.test.lengths):
            collected = collect(run, hooks, named.test, evaluate_batch)
        write = partial(_write, out, task, collected.outputs, named, rows)
        on_all_ranks(run, hooks, failed, write if world.is_main else None)
        done += len(rows.records)
        if world.is_main and time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            log.info("%d of %d rows", done, prediction.rows)
    on_all_ranks(run, hooks, failed, out.finish if world.is_main else None)


def _write(
    out: PredictionFile, task: BoundTask, outputs: Outputs, data: Datasets, rows: FileRows
) -> None:
    out.add(task.predictions.unlabeled_lines(outputs, data, rows))
