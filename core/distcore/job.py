"""From a config and flags to ranks that train, and what their main rank says at the end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from distcore.config import RunConfig, load_config, parse_settings
from distcore.contract import Place
from distcore.errors import ConfigError, RankError
from distcore.flags import FLAGS
from distcore.launch import join, launch, run_as_rank
from distcore.logs import set_up_logging
from distcore.tasks.contract import Datasets

log = logging.getLogger("distcore")


def run(arguments: argparse.Namespace) -> int:
    """Join the ranks that a launcher started, or start them; raises DistcoreError."""
    place = join(os.environ)
    if place is None:
        _start(arguments)
        return 0
    errors = errors_of_job()
    run_as_rank(partial(_join, arguments, place), errors, place.rank, place.size)
    with contextlib.suppress(OSError):  # the last rank of this machine finds it empty
        errors.rmdir()
    return 0


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Build the config: the file, over it the flags, over them ``--set``."""
    return load_config(arguments.config, changes_of(arguments))


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What flags and ``--set`` say, by dotted key."""
    given = vars(arguments)
    return {flag.key: given[flag.key] for flag in FLAGS if flag.key in given} | parse_settings(arguments.set)


def train_rank(config: RunConfig) -> None:
    """What each rank does: train, and on the main rank say how it went. A function that ranks can be sent."""
    from distcore.trainer import train

    rank = (join(os.environ) or Place()).rank
    set_up_logging(config, rank)
    report = train(config)
    if rank == 0:
        show(report)


def show(report: dict[str, Any]) -> None:
    """Print the test's metrics, its classification report, and where the run folder is."""
    show_evaluation(f"test at step {report['steps']}", report["evaluation"])
    print(f"run folder: {report['out']}", flush=True)


def show_evaluation(what: str, evaluation: dict[str, Any]) -> None:
    """Print the metrics of an evaluation in a line, and its classification report."""
    from distcore.extensions.progress import describe_evaluation

    print(describe_evaluation(what, evaluation))
    if table := evaluation.get("classification_report"):
        print(table, flush=True)


def _join(arguments: argparse.Namespace, place: Place) -> None:
    config = config_of(arguments)
    if config.max_restarts:
        raise ConfigError(f"max_restarts = {config.max_restarts}: {place.launcher} started the ranks: its to restart")
    if not arguments.dry_run:
        train_rank(config)
    elif place.rank == 0:
        print(_plan(*check(config, place)))


def _start(arguments: argparse.Namespace) -> None:
    """Check all that can be known before ranks start; then start them, or say what they would do."""
    config = config_of(arguments)
    set_up_logging(config, rank=0)
    config, data = check(config)
    if arguments.dry_run:
        print(_plan(config, data))
        return
    if config.nproc == 1 and not config.max_restarts:
        train_rank(config)
        return
    preload(config, data)
    del data  # ranks open it from the cache
    launch_and_restart(config)


def preload(config: RunConfig, data: Datasets) -> None:
    """Import the code of model and schedule here, once: ranks are forked from this process, after a death too."""
    from distcore.trainer import load_task, model_source

    model_source(config, load_task(config), data).skeleton()
    import_module("transformers.optimization")


def launch_and_restart(config: RunConfig) -> None:
    """Start the ranks; when one dies, start all afresh from the newest checkpoint, ``max_restarts`` times at most."""
    out = Path(str(config.out))
    for restarts in range(config.max_restarts + 1):
        try:
            launch(train_rank, config, nproc=int(config.nproc), errors=out / "errors", patience=config.timeout)
            return
        except RankError as error:
            if restarts == config.max_restarts:
                raise
            log.warning("%s; restart %d of %d", error, restarts + 1, config.max_restarts)
        config = config.model_copy(update={"resume": resume_after_death(config)})


def resume_after_death(config: RunConfig) -> str:
    """Where a job that died goes on: its own newest checkpoint, or before the first where it began."""
    from distcore import checkpoint

    own = checkpoint.find("auto", Path(str(config.out)))
    return "auto" if own or not config.resume else config.resume


def _plan(config: RunConfig, data: Datasets) -> str:
    from distcore.dry_run import describe

    return describe(config, data)


def check(config: RunConfig, place: Place | None = None) -> tuple[RunConfig, Datasets]:
    """Resolve the config and prepare the data, as every rank will; raises DistcoreError, and writes no run folder."""
    from distcore import checkpoint
    from distcore.extensions import load_extensions
    from distcore.hooks import Hooks
    from distcore.resolve import build_strategy, check_out, resolve
    from distcore.trainer import load_task

    config = resolve(config, place.size, place.launcher) if place else resolve(config)
    Hooks(config.strategy, build_strategy(config), load_extensions(config))
    check_out(config)
    found = checkpoint.find(config.resume, Path(str(config.out))) if config.resume else None
    if found is not None:
        checkpoint.read_small_state(found)
    return config, load_task(config).prepare(config)


def errors_of_job() -> Path:
    """A folder that the ranks of one launcher on this machine share, before a config says where the run lives."""
    return Path(tempfile.gettempdir(), f"distcore-joined-{os.getuid()}-{os.getppid()}")
