"""From a config to ranks that train, and to their report."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import registry
from distcore.config import RunConfig
from distcore.errors import (
    INTERRUPTED,
    ConfigError,
    DataError,
    DistcoreError,
    MetaModelError,
    ModelError,
    RankError,
    StoppedError,
    packages_that_do_not_fit,
    print_uncaught_on_one_line,
    refuse_endings,
    write_traceback,
)
from distcore.jobs.logs import set_up_logging
from distcore.launchers import launch
from distcore.launchers.processes.binding import bind_cores
from distcore.launchers.processes.failures import Failure, describe, run_as_rank
from distcore.launchers.processes.log_files import log_to_file, write_pid_file
from distcore.plugin.report import Report
from distcore.plugin.strategy.contract import RankInfo
from distcore.plugin.task.task import Datasets, Task
from distcore.rank_environment import join
from distcore.rank_environment.network import where

if TYPE_CHECKING:
    from distcore.resolve.resolve import Resolved

log = logging.getLogger("distcore")


def run(
    read_config: Callable[[], RunConfig],
    dry_run: bool = False,
    explain: Callable[[Failure], str] = lambda _: "",
) -> None:
    """Train as one of the ranks that a launcher started, or start the ranks; raises DistcoreError.

    ``read_config`` is called in here, so that only one of several ranks prints an error in the
    config. ``dry_run`` prints the resolved config and the work of each rank, and starts nothing.
    ``explain`` returns the end of the error line of a rank that a launcher started.
    """
    rank_info = join(os.environ)
    if rank_info is None:
        _start(read_config(), dry_run)
        return
    errors = errors_of_job()
    run_as_rank(
        partial(_join, read_config, dry_run, rank_info),
        errors,
        rank_info.rank,
        rank_info.size,
        where(rank_info),
        partial(errors_of_run, read_config),
        explain,
    )
    # Fails but for the last rank of this machine, which finds it empty.
    with contextlib.suppress(OSError):
        errors.rmdir()


def train(config: RunConfig, task: Task | None = None) -> Report:
    """Train, evaluate and test; return the report, which is also written to report.json; its
    ``plot()`` draws the run.

    In ranks that a launcher started (torchrun, ``srun``, ``distcore.launch``) every rank calls, and
    gets the same report. Otherwise this process trains if ``config.nproc`` resolves to one rank.
    For several ranks it starts them on this machine, and ends with them. ``task`` replaces the task
    of the config.

    Ranks are forked, so a notebook may define the class of ``task``. On macOS, and after this
    process has used a GPU, they are spawned: ``task`` must then be picklable, and a script needs a
    ``__main__`` guard.

    Raises DistcoreError, one line, for every error that the user can correct, and RankError for any
    other. A script that does not catch it prints that line alone.
    """
    from distcore.engine import trainer

    print_uncaught_on_one_line()
    resolved = resolve_here(config, task=task)
    rank_info = join(os.environ)
    if not log.hasHandlers():  # a program with logging of its own keeps that
        set_up_logging(config, rank_info.rank if rank_info else 0)
    # Its error is left as it is: ``launch`` finds the cause among the errors of all ranks.
    if rank_info is not None and rank_info.launcher == "local":
        return trainer.train(resolved, rank_info)
    trains_here = resolved.config.nproc == 1 and not resolved.config.max_restarts
    with one_line(resolved.config.out, rank_info):
        if rank_info is not None or trains_here:
            return trainer.train(resolved, rank_info or RankInfo())
        preload(resolved, check(resolved))
        return launch_and_restart(resolved.config, task)


@contextmanager
def one_line(out: str | None, rank_info: RankInfo | None = None) -> Iterator[None]:
    """Raise RankError for an error that is not distcore's; the traceback goes to the run
    folder ``out``, if any.
    """
    try:
        yield
    except DistcoreError:
        raise
    except Exception as error:
        folder = Path(out, "errors") if out else None
        if rank_info is not None:
            file = write_traceback(error, folder, f"rank-{rank_info.rank}.txt")
            failure = describe(error, rank_info.rank)
            raise RankError(failure.line(rank_info.size, file)) from error
        file = write_traceback(error, folder, "traceback.txt")
        failure = describe(error, 0)
        misfit = packages_that_do_not_fit(error)
        if misfit:
            raise ConfigError(f"{misfit}; traceback in {file}") from error
        raise RankError(f"{failure.cause}; traceback in {file}{failure.at}") from error


def train_rank(config: RunConfig, task: Task | None = None) -> Report:
    """Train in one rank, with its logs on stderr. At module level, so that it can
    be pickled for ranks.
    """
    from distcore.engine import trainer

    rank_info = join(os.environ) or RankInfo()
    bind_cores(rank_info.local_rank, rank_info.local_size)
    set_up_logging(config, rank_info.rank)
    return trainer.train(resolve_here(config, task=task), rank_info)


def resolve_here(config: RunConfig, training: bool = True, task: Task | None = None) -> Resolved:
    """Resolve a config in this process: as the rank that a launcher started, or
    before any is started.
    """
    registry.refuse_while_importing()
    from distcore.resolve.resolve import resolve

    rank_info = join(os.environ)
    if rank_info is None:
        return resolve(config, training=training, task=task)
    return resolve(
        config, nproc=rank_info.size, launcher=rank_info.launcher, training=training, task=task
    )


def show(report: Report, config: RunConfig) -> None:
    """Print the metrics of the final test, unless progress has, its classification report,
    and the run folder.
    """
    # The progress has printed the last evaluation, which then was the test.
    has_progress = config.extensions.get("progress", True) is not False
    is_shown = report["test_is_last_evaluation"] and has_progress
    if is_shown:
        rows = next((f"those of {name}" for name in report["evaluations"]), "the evaluation rows")
        title = f"the test rows are {rows}"
    else:
        of_ema = " of the EMA" if report["weights"] == "ema" else ""
        title = f"test{of_ema} at step {report['steps']}"
    show_evaluation(title, report["evaluation"], is_shown)
    print(f"run folder: {report['out']}", flush=True)


def show_evaluation(what: str, evaluation: dict[str, Any], is_said: bool = False) -> None:
    """Print ``what`` and, unless that ``is_said``, the metrics of an evaluation;
    then the task's text.
    """
    from distcore.extensions.progress import describe_evaluation

    print(what if is_said else describe_evaluation(what, evaluation))
    for text in filter(None, map(evaluation.get, ("classification_report", "remark"))):
        print(text, flush=True)


def _join(read_config: Callable[[], RunConfig], dry_run: bool, rank_info: RankInfo) -> None:
    """Train as a rank that another launcher has started."""
    config = read_config()
    if config.max_restarts:
        starter = rank_info.launcher
        raise ConfigError(
            f"max_restarts = {config.max_restarts}: {starter} started the ranks; have it restart"
            " them"
        )
    if not dry_run:
        report = train_rank(config)
        if rank_info.rank == 0:
            show(report, config)
    elif rank_info.rank == 0:
        _show_plan(resolve_here(config))


def _start(config: RunConfig, dry_run: bool) -> None:
    """Train from a process that starts the ranks itself."""
    set_up_logging(config, rank=0)
    with one_line(None if dry_run else config.out):
        resolved = resolve_here(config)
        if dry_run:
            _show_plan(resolved)
            return
    with one_line(resolved.config.out), _say_what_is_saved(resolved.config):
        show(_train_here(resolved), config)


@contextmanager
def _say_what_is_saved(config: RunConfig) -> Iterator[None]:
    """End an interrupted or stopped job with a line about its newest checkpoint."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        # A SystemExit comes where ranks were stopped before they trained.
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else error.code
        if code not in (INTERRUPTED, StoppedError().exit_code):
            raise
        how = "interrupted" if code == INTERRUPTED else "stopped"
        raise StoppedError(f"{how}; {what_is_saved(config)}", code) from None


def what_is_saved(config: RunConfig) -> str:
    """Return, for a run that was stopped, the command that continues it, or
    that nothing was saved.
    """
    from distcore.engine.fit import resume_command
    from distcore.resolve.run_folder import has_checkpoint

    out = Path(str(config.out))
    if has_checkpoint(out):
        return resume_command(config)
    return (
        f"nothing was saved: {out} has no checkpoint yet" if out.exists() else "nothing was saved"
    )


def _train_here(resolved: Resolved) -> Report:
    """Check the job, then train in this process, or in ranks that it starts on this machine."""
    from distcore.engine import trainer
    from distcore.launchers.processes.cores import keep_to_cores

    is_rank = resolved.config.nproc == 1 and not resolved.config.max_restarts
    data = check(resolved)
    with write_pid_file():
        if is_rank:
            bind_cores(local_rank=0, local_size=1)
            keep_to_cores()
            log_to_file(rank=0)
            del data  # the rank opens it from the cache
            return trainer.train(resolved, RankInfo())
        preload(resolved, data)
        del data  # ranks open it from the cache
        return launch_and_restart(resolved.config)


def preload(resolved: Resolved, data: Datasets) -> None:
    """Import the code of model and optimizer once, in this process: ranks, restarted ones too,
    are forked from it.

    Raises TaskError for a model that would end these ranks before their first step.
    """
    from distcore.engine.causality import check_causal_kind
    from distcore.model.model_source import model_source

    with contextlib.suppress(MetaModelError):  # the ranks then import for themselves what is left
        model_source(resolved.config, resolved.task, data).meta_model()
    import_module("torch._dynamo")  # torch imports it with the first step of an optimizer
    check_causal_kind(resolved.task)


def launch_and_restart(config: RunConfig, task: Task | None = None) -> Report:
    """Start the ranks; if one dies, start all again from the newest
    checkpoint, at most ``max_restarts`` times.

    Returns their report. Raises RankError for the last failure.
    """
    from distcore.launchers.processes.cores import crowding_warning
    from distcore.resolve.run_folder import after_failure, set_aside

    set_aside(config)
    if warning := crowding_warning(config):
        log.warning("%s", warning)
    if port := os.environ.get("MASTER_PORT"):
        log.warning(
            "MASTER_PORT = %s: is not used; ranks on this machine meet at a port that is free", port
        )
    out = Path(str(config.out))
    restarts = 0
    while True:
        try:
            return launch(
                train_rank,
                config,
                task,
                nproc=int(config.nproc),
                errors=out / "errors",
                grace_period=config.timeout,
            )[0]
        except RankError as error:
            if restarts == config.max_restarts:
                raise
            restarts += 1
            log.warning("%s; restart %d of %d", error, restarts, config.max_restarts)
        config = after_failure(config)


def _show_plan(resolved: Resolved) -> None:
    from distcore.jobs.dry_run import describe

    data = check(resolved)
    check_built(resolved, data)
    print(describe(resolved, data))


def check_built(resolved: Resolved, data: Datasets) -> None:
    """Raise ModelError or TaskError for a model that could not be trained or saved.

    Such a model is found if it can be built without values, or, for a causal task, in a small form.
    A run finds it when it builds the model.
    """
    from distcore.engine.causality import check_causal_kind
    from distcore.engine.module_checks import check_module
    from distcore.model.model_source import model_source

    with contextlib.suppress(MetaModelError):
        meta_model = model_source(resolved.config, resolved.task, data).meta_model()
        check_module(resolved.config, resolved.capabilities, meta_model)
    check_causal_kind(resolved.task)


def check(resolved: Resolved) -> Datasets:
    """Prepare and return the data as every rank will, and check strategy,
    extensions and run folder.

    Writes nothing to the run folder. Raises DistcoreError.
    """
    from distcore import checkpoint
    from distcore.checkpoint.foreign import reader_of
    from distcore.engine.best import check_judged_rows
    from distcore.engine.exact import refuse_changers
    from distcore.engine.trainer import load_extensions
    from distcore.model.model_source import check_model, model_source
    from distcore.plugin.strategy.capabilities import ChecksConfig
    from distcore.plugin.strategy.hooks import Hooks
    from distcore.plugin.strategy.tally import Tally
    from distcore.resolve.complete import complete
    from distcore.resolve.run_folder import check_out

    config = resolved.config
    extensions = load_extensions(config)
    hooks = Hooks(config.strategy, resolved.strategy, extensions | resolved.task.listener())
    if config.exact is not None:
        refuse_changers(hooks)
    for extension in extensions.values():
        if isinstance(extension, ChecksConfig):
            extension.check_config(config)
    Tally((*resolved.task.logs, *hooks.logs))  # refuses a name that two log
    check_out(config)
    foreign = reader_of(config.resume)
    newest = (
        checkpoint.find(config.resume, Path(str(config.out)))
        if config.resume and not foreign
        else None
    )
    job_state = checkpoint.Checkpoint(newest).job_state() if newest else {}
    with refuse_endings():
        data = resolved.task.prepare(config)
    check_model(config, resolved.task, data, resolved.strategy)
    completed = complete(resolved, data)
    if newest:
        check_judged_rows(completed.config, resolved.task, data, job_state, newest)
    if foreign:
        model = model_source(completed.config, resolved.task, data).meta_model()
        foreign.read(Path(str(config.resume)), completed.config, model, len(data.train))
    return data


def prepare_data(config: RunConfig) -> None:
    """Prepare the data of a run whose ranks are started elsewhere, in one
    process without an accelerator.

    Raises DistcoreError. What else a run needs, its own machines have.
    """
    from distcore.resolve.complete import in_one_process

    try:
        resolved = resolve_here(in_one_process(config))
    except (DataError, ModelError):
        raise
    except DistcoreError as error:  # such as an option that one process has no use for
        log.debug("data: not looked at: %s", error)
        return
    with refuse_endings():
        resolved.task.prepare(resolved.config)


def errors_of_job() -> Path:
    """Return a folder for the errors of the ranks that one launcher started here, before they
    have read the config.
    """
    # on Windows everybody has a temporary folder of their own
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir(), f"distcore-joined-{user}-{os.getppid()}")


def errors_of_run(read_config: Callable[[], RunConfig]) -> Path | None:
    """Return the folder for errors in the run folder; ``None`` unless a run has begun there."""
    out = read_config().out
    return Path(out, "errors") if out and Path(out, "config.yaml").is_file() else None
