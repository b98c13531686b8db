"""From a config to ranks that train and to their report, which the command line prints."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from distcore.config import RunConfig
from distcore.errors import ConfigError, RankError, SkeletonError
from distcore.jobs.logs import set_up_logging
from distcore.launchers import launch
from distcore.launchers.processes.binding import bind_cores
from distcore.launchers.processes.failures import Failure, run_as_rank
from distcore.launchers.processes.log_files import log_to_file, pid_file
from distcore.plugin.report import Report
from distcore.plugin.strategy.contract import RankInfo
from distcore.plugin.task.task import Datasets, Task
from distcore.rank_environment import join
from distcore.rank_environment.network import where

log = logging.getLogger("distcore")


def run(
    read_config: Callable[[], RunConfig], dry_run: bool = False, explain: Callable[[Failure], str] = lambda _: ""
) -> None:
    """Train as one of the ranks that a launcher started, or start the ranks; raises DistcoreError.

    ``read_config`` is called in here, where only one of several ranks prints an error in the config. ``dry_run``: print
    the resolved config and what each rank would do, and start nothing. What ``explain`` returns ends the error line of
    a rank that a launcher started.
    """
    rank_info = join(os.environ)
    if rank_info is None:
        _start(read_config(), dry_run)
        return
    errors = errors_of_job()
    bind_cores(rank_info.local_rank, rank_info.local_size)
    run_as_rank(
        partial(_join, read_config, dry_run, rank_info),
        errors,
        rank_info.rank,
        rank_info.size,
        where(rank_info),
        partial(errors_of_run, read_config),
        explain,
    )
    with contextlib.suppress(OSError):  # fails but for the last rank of this machine, which finds it empty
        errors.rmdir()


def train(config: RunConfig, task: Task | None = None) -> Report:
    """Train, evaluate and test; return the report, which is also written to report.json.

    In ranks that a launcher started (torchrun, ``srun``, ``distcore.launch``) every rank calls, and gets the same
    report. Elsewhere this process trains if ``config.nproc`` comes to one rank; else it starts the ranks on this
    machine, and ends with them. ``task`` replaces the task that the config names.

    Ranks are forked, so that ``task`` may be of a class that a notebook defines. They are spawned on macOS and where
    this process has used a GPU: then ``task`` must be picklable, and a script needs a ``__main__`` guard.

    Raises DistcoreError, one line, for every error that the user can correct.
    """
    from distcore.engine import trainer
    from distcore.resolve.resolve import resolve

    if join(os.environ) is None:
        config = resolve(config, task=task)
        if config.nproc != 1 or config.max_restarts:
            config, data = check(config, task=task)
            preload(config, data, task)
            del data  # ranks have their own
            return launch_and_restart(config, task)
    return trainer.train(config, task)


def train_rank(config: RunConfig, task: Task | None = None) -> Report:
    """Train in one rank, with its logs on stderr. At module level, so that it can be pickled for ranks."""
    from distcore.engine import trainer

    set_up_logging(config, (join(os.environ) or RankInfo()).rank)
    return trainer.train(config, task)


def show(report: Report) -> None:
    """Print the metrics of the final test, its classification report, and the run folder."""
    of = " of the EMA" if report["weights"] == "ema" else ""
    show_evaluation(f"test{of} at step {report['steps']}", report["evaluation"])
    print(f"run folder: {report['out']}", flush=True)


def show_evaluation(what: str, evaluation: dict[str, Any]) -> None:
    """Print the metrics of an evaluation on one line that begins with ``what``, then its classification report."""
    from distcore.extensions.progress import describe_evaluation

    print(describe_evaluation(what, evaluation))
    if table := evaluation.get("classification_report"):
        print(table, flush=True)


def _join(read_config: Callable[[], RunConfig], dry_run: bool, rank_info: RankInfo) -> None:
    """Train as the rank that a launcher started, or print on rank 0 what it would do."""
    config = read_config()
    if config.max_restarts:
        starter = rank_info.launcher
        raise ConfigError(f"max_restarts = {config.max_restarts}: {starter} started the ranks; have it restart them")
    if not dry_run:
        report = train_rank(config)
        if rank_info.rank == 0:
            show(report)
    elif rank_info.rank == 0:
        print(_plan(*check(config, rank_info)))


def _start(config: RunConfig, dry_run: bool) -> None:
    """Check everything that can be checked before ranks start; then start them, or print what they would do."""
    from distcore.launchers.processes.cores import keep_to_cores

    set_up_logging(config, rank=0)
    config, data = check(config)
    if dry_run:
        print(_plan(config, data))
        return
    with pid_file():
        if config.nproc == 1 and not config.max_restarts:
            keep_to_cores()
            log_to_file(rank=0)
            show(train_rank(config))
            return
        preload(config, data)
        del data  # ranks open it from the cache
        show(launch_and_restart(config))


def preload(config: RunConfig, data: Datasets, task: Task | None = None) -> None:
    """Import the code of model and optimizer once, in this process: ranks, restarted ones too, are forked from it."""
    from distcore.model.model_source import model_source
    from distcore.resolve.resolve import load_task

    with contextlib.suppress(SkeletonError):  # the ranks then import for themselves what is left
        model_source(config, task or load_task(config), data).skeleton()
    import_module("torch._dynamo")  # torch imports it with the first step of an optimizer


def launch_and_restart(config: RunConfig, task: Task | None = None) -> Report:
    """Start the ranks; if one dies, start all again from the newest checkpoint, at most ``max_restarts`` times.

    Returns their report. Raises RankError for the last failure.
    """
    from distcore.launchers.processes.cores import crowded

    if warning := crowded(config):
        log.warning("%s", warning)
    out, restarts = Path(str(config.out)), 0
    while True:
        try:
            reports = launch(
                train_rank, config, task, nproc=int(config.nproc), errors=out / "errors", grace_period=config.timeout
            )
            return reports[0]
        except RankError as error:
            if restarts == config.max_restarts:
                raise
            restarts += 1
            log.warning("%s; restart %d of %d", error, restarts, config.max_restarts)
        config = config.model_copy(update={"resume": resume_after_failure(config)})


def resume_after_failure(config: RunConfig) -> str:
    """Return the value of ``resume`` for a restart: its own newest checkpoint, or, without one, where the job began."""
    from distcore import checkpoint

    own = checkpoint.find("auto", Path(str(config.out)))
    return "auto" if own or not config.resume else config.resume


def _plan(config: RunConfig, data: Datasets) -> str:
    from distcore.jobs.dry_run import describe
    from distcore.resolve.resolve import load_task

    return describe(_with_packing(config, load_task(config), data), data)


def _with_packing(config: RunConfig, task: Task, data: Datasets) -> RunConfig:
    """Return ``config`` with ``packing`` as the ranks will choose it; raises ConfigError where it cannot be on."""
    from distcore.engine.packing import choose
    from distcore.plugin.strategy.hooks import capabilities_of
    from distcore.resolve.resolve import build_strategy

    return choose(config, capabilities_of(config.strategy, build_strategy(config)), task, data)[0]


def check(config: RunConfig, rank_info: RankInfo | None = None, task: Task | None = None) -> tuple[RunConfig, Datasets]:
    """Resolve the config and prepare the data as every rank will, and check strategy, extensions and run folder.

    ``task`` replaces the task that the config names. Writes nothing to the run folder. Raises DistcoreError.
    """
    from distcore import checkpoint
    from distcore.model.model_source import check_model
    from distcore.plugin.extensions import load_extensions
    from distcore.plugin.strategy.hooks import Hooks
    from distcore.plugin.task.bound import BoundTask
    from distcore.resolve.resolve import build_strategy, load_task, resolve
    from distcore.resolve.run_folder import check_out

    started: dict[str, Any] = {"nproc": rank_info.size, "launcher": rank_info.launcher} if rank_info else {}
    config = resolve(config, task=task, **started)
    strategy = build_strategy(config)
    Hooks(config.strategy, strategy, load_extensions(config))
    check_out(config)
    found = checkpoint.find(config.resume, Path(str(config.out))) if config.resume else None
    if found is not None:
        checkpoint.read_job_state(found)
    task = BoundTask.of(task or load_task(config))
    data = task.prepare(config)
    check_model(config, task, data, strategy)
    _with_packing(config, task, data)
    return config, data


def errors_of_job() -> Path:
    """Return a folder for the errors of all ranks that one launcher started on this machine.

    Ranks need it before they have read the config, which names the run folder.
    """
    user = os.getuid() if hasattr(os, "getuid") else "user"  # on Windows everybody has a temporary folder of their own
    return Path(tempfile.gettempdir(), f"distcore-joined-{user}-{os.getppid()}")


def errors_of_run(read_config: Callable[[], RunConfig]) -> Path | None:
    """Return the folder for errors in the run folder; ``None`` unless a run has begun there."""
    out = read_config().out
    return Path(out, "errors") if out and Path(out, "config.yaml").is_file() else None
