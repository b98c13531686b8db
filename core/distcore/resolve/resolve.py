"""Resolve a config: replace every 'auto', and refuse what cannot work before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from distcore.config import RunConfig, is_open, with_changes
from distcore.distributed.arithmetic import check_arithmetic
from distcore.distributed.devices import has_fast_bf16, resolve_device
from distcore.errors import ConfigError
from distcore.hints import nearest
from distcore.model import adapters
from distcore.model.compiling import compile_mode
from distcore.model.optim import check_freeze, check_schedule, optimizer_options
from distcore.model.run_schedule import schedule_options
from distcore.plugin.strategy.capabilities import (
    Capabilities,
    ChecksConfig,
    ChecksEvaluation,
    FillsConfig,
)
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Datasets, Task
from distcore.resolve import strategies, tasks
from distcore.resolve.check_capabilities import (
    check_average,
    check_declared,
    check_optimizer,
    check_task,
    log_compilation,
)
from distcore.resolve.dropout_masks import dropout_masks
from distcore.resolve.exact import check_exact, exact_values
from distcore.resolve.micro_batches import forward_tokens, length_grouping, micro_batch_tokens
from distcore.resolve.run_folder import new_run_folder
from distcore.resolve.world_size import check_micro_batch_size, data_shards, world_size

log = logging.getLogger("distcore")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A run that can start: made once by ``resolve``, changed by nobody."""

    config: RunConfig
    """Every 'auto' replaced that does not need the data, and everything checked."""
    strategy: object
    """The strategy of the config, built from its options."""
    capabilities: Capabilities
    """The strategy's capabilities."""
    task: BoundTask
    """The task of the config, built from its options."""


def resolve(
    config: RunConfig,
    nproc: int | None = None,
    launcher: str = "local",
    training: bool = True,
    task: Task | None = None,
    elsewhere: bool = False,
) -> Resolved:
    """Replace every 'auto' that does not need the data, check all values, and
    build strategy and task.

    ``nproc`` is the number of ranks if ``launcher`` has already started them. With
    ``training=False`` the run only evaluates: optimizer and schedule belong to the earlier
    training, and are not checked. ``task`` replaces the task of the config. With ``elsewhere`` the
    run is on another machine, so this one need not have the device. Raises DistcoreError, one line.
    """
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"config: expected a RunConfig, and was given a {type(config).__name__}: train(config,"
            " task)"
        )
    if config.resume == "auto" and config.out is None:
        raise ConfigError("resume = 'auto': needs --out, the folder of the run to continue")
    chosen = strategies.load_strategy(config)
    trained = BoundTask.wrap(task) if task else tasks.load_task(config)
    declared = chosen.capabilities
    recorded: dict[str, Any] = {"strategy": chosen.name, "strategy_options": chosen.options}
    recorded |= tasks.recorded(config, trained, is_given=task is not None)
    # Twice: a file may name the number of ranks, and may have values that depend on it.
    from_file = _from_file(config, config, chosen.plugin, nproc)
    requested = with_changes(config, recorded | from_file)
    device = resolve_device(requested, elsewhere)
    ranks = world_size(requested, declared, device, nproc)
    precision = _precision(requested, declared, device)
    placed = with_changes(requested, {"device": device, "nproc": ranks, "precision": precision})
    from_file = _from_file(config, placed, chosen.plugin, nproc)
    if from_file:
        values = ", ".join(f"{key} = {value}" for key, value in from_file.items())
        log.info("the file of strategy %r says: %s", chosen.name, values)
    placed = with_changes(placed, from_file)
    check_declared(placed, declared, launcher)
    check_task(placed, declared, trained, training)
    check_arithmetic(placed)
    placed = with_changes(placed, exact_values(placed))
    if training:
        check_exact(placed, declared)
    decided: dict[str, Any] = _of_training(placed, declared) if training else {}
    check_micro_batch_size(placed, data_shards(placed, declared, ranks))
    decided |= adapters.resolved(placed)
    decided |= {
        "micro_batch_tokens": micro_batch_tokens(placed),
        "loader.length_grouping": length_grouping(placed, trained),
        "loader.forward_tokens": forward_tokens(placed, declared),
        "lr": _learning_rate(placed, trained),
        "checkpoints.best": _chosen_metric(placed, trained),
        "out": placed.out or new_run_folder(placed),
    }
    if placed.prove == "auto" and trained.laws_hold:
        decided["prove"] = "off"
    resolved = with_changes(placed, decided)
    if not training and isinstance(chosen.plugin, ChecksEvaluation):
        chosen.plugin.check_evaluation(resolved)
    elif isinstance(chosen.plugin, ChecksConfig):
        chosen.plugin.check_config(resolved)
    return Resolved(config=resolved, strategy=chosen.plugin, capabilities=declared, task=trained)


def _from_file(
    config: RunConfig, placed: RunConfig, strategy: object, started: int | None
) -> dict[str, Any]:
    """Return, by dotted key, values from the strategy's own config file for keys
    that ``config`` leaves open.

    ``placed`` is the config as far as it is known. ``started`` is the number of ranks if a launcher
    has started them; it overrides the file.
    """
    if not isinstance(strategy, FillsConfig):
        return {}
    values = {}
    for key, value in strategy.fill_config(placed).items():
        is_started = key == "nproc" and started is not None
        if is_open(config, key) and not is_started:
            values[key] = value
    return values


def _precision(config: RunConfig, declared: Capabilities, device: str) -> str:
    """Return the precision; for 'auto' bf16 if the device is fast in it and the strategy declares
    no problem with it.

    For an accelerator only its rank can tell, in ``device_of``; here every one counts as fast.
    """
    if config.precision != "auto":
        return config.precision
    is_fast = device != "cpu" or has_fast_bf16()
    is_sound = "bf16" in declared.precisions and "bf16" not in declared.exempt
    return "bf16" if is_fast and is_sound else "fp32"


def _of_training(config: RunConfig, declared: Capabilities) -> dict[str, Any]:
    """Return changes to the config that only a training needs; raises ConfigError."""
    check_optimizer(config, declared)
    options = {f"optimizer.{name}": value for name, value in optimizer_options(config).items()}
    check_average(config, declared)
    check_schedule(config)
    options |= {f"schedule.{name}": value for name, value in schedule_options(config).items()}
    check_freeze(config)
    mode = compile_mode(config, declared)
    log_compilation(config, mode)
    return options | {"compile": mode, "dropout_masks": dropout_masks(config, declared, mode)}


def _chosen_metric(config: RunConfig, task: BoundTask) -> str | None:
    """Return the metric by which the best checkpoint is chosen; ``None`` if none is.

    Raises ConfigError for a metric that the task does not report, and for patience without one.
    """
    best = config.checkpoints.best
    metrics = task.declared_metrics
    if best == "auto":
        best = "loss" if "loss" in metrics else next(iter(metrics), None)
    if best is None and config.patience:
        raise ConfigError(
            f"patience = {config.patience}: needs a metric to judge by; name one by"
            " checkpoints.best"
        )
    if config.patience and not (config.eval_at_epoch_end or config.eval_every):
        raise ConfigError(
            f"patience = {config.patience}: nothing is evaluated before the end; set --eval-every"
        )
    # Of several evaluation sets it is SET/METRIC.
    if best is not None and best not in metrics and best.partition("/")[2] not in metrics:
        raise _no_metric(config, best, metrics)
    return best


def best_metric(config: RunConfig, task: BoundTask, data: Datasets) -> str | None:
    """Return the metric by its name in an evaluation; without a set in it, it is a metric
    of the first set.
    """
    best = config.checkpoints.best
    metrics = data.metrics_of_sets(task.declared_metrics)
    if best is None or best in metrics:
        return best
    of_first = "/".join((*list(data.evaluations)[:1], best))
    if of_first not in metrics:
        raise _no_metric(config, best, metrics)
    return of_first


def _no_metric(config: RunConfig, best: str, metrics: Collection[str]) -> ConfigError:
    known = ", ".join(metrics) or "none"
    return ConfigError(
        f"checkpoints.best = {best!r}: no metric of task {config.task!r}{nearest(best, metrics)}"
        f" (metrics: {known})"
    )


def _learning_rate(config: RunConfig, task: BoundTask) -> float:
    """Return the peak learning rate, by default the task's; raises ConfigError."""
    if config.lr == "auto":
        suggested = task.suggest(config).get("lr")
        if not isinstance(suggested, float):
            raise ConfigError(f"lr = 'auto': task {task.name} suggests none; give one with --lr")
        return suggested
    if config.lr <= 0:
        raise ConfigError(f"lr = {config.lr}: must be greater than 0")
    return config.lr
