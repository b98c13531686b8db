"""Resolve a config: replace every 'auto', and refuse what cannot work before any process starts."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

from distcore.config import DEFAULT_TASK, GIVEN, RunConfig
from distcore.distributed.devices import check_deterministic, count_devices, has_fast_bf16, resolve_device
from distcore.engine.declared import check_average, check_declared, compiled, strategies_that, with_optimizer
from distcore.engine.lora import resolve_lora
from distcore.engine.micro_batches import micro_batch_tokens, with_forward_tokens
from distcore.engine.optim import check_freeze, check_schedule
from distcore.errors import ConfigError, StrategyError, nearest
from distcore.plugin import registry
from distcore.plugin.capabilities import Capabilities, ChecksConfig, ChecksEvaluation, FillsConfig
from distcore.plugin.hooks import capabilities_of
from distcore.plugin.options import build, values_of
from distcore.plugin.shorthand import expand_shorthand
from distcore.plugin.task import Suggests, Task, declared_metrics

MOST_RANKS = 2**16
"""Most ranks that a message proposes."""


def resolve(
    config: RunConfig,
    nproc: int | None = None,
    launcher: str = "local",
    training: bool = True,
    task: Task | None = None,
) -> RunConfig:
    """Return ``config`` with every 'auto' replaced that does not need the data, after checking all values.

    ``nproc`` is the number of ranks if ``launcher`` has already started them. With ``training=False`` the run only
    evaluates: the optimizer and the schedule, which belong to the run that trained, are not checked. ``task`` replaces
    the task that the config names. Raises DistcoreError, one line.
    """
    if config.resume == "auto" and config.out is None:
        raise ConfigError("resume = 'auto': needs --out, the folder of the run to continue")
    config = expand_shorthand(config)
    config, task = _with_task(config, task)
    strategy = build_strategy(config)
    config = _filled(config, strategy, nproc)
    declared = capabilities_of(config.strategy, strategy)
    device = resolve_device(config)
    world_size = _world_size(config, declared, device, nproc)
    config = config.model_copy(update={"nproc": world_size, "device": device})
    config = config.model_copy(update={"precision": _precision(config, declared)})  # after the device: it depends on it
    check_declared(config, declared, launcher)
    check_deterministic(config)
    if training:
        config = with_optimizer(config, declared)
        check_average(config, declared)
        check_schedule(config)
        check_freeze(config)
        config = compiled(config, declared)
    check_micro_batch_size(config, data_shards(config, declared, world_size))
    config = config.model_copy(
        update={
            "micro_batch_tokens": micro_batch_tokens(config),
            "loader": with_forward_tokens(config, declared),
            "lr": _learning_rate(config, task),
            "lora": resolve_lora(config),
            "checkpoints": config.checkpoints.model_copy(update={"best": _best_metric(config, task)}),
            "out": config.out or _new_run_folder(config),
        }
    )
    if not training and isinstance(strategy, ChecksEvaluation):
        strategy.check_evaluation(config)
    elif isinstance(strategy, ChecksConfig):
        strategy.check_config(config)
    return config


def _filled(config: RunConfig, strategy: object, started: int | None) -> RunConfig:
    """Take values from the strategy's own config file for keys that the user did not set.

    ``started`` is the number of ranks if a launcher has started them; it overrides the file.
    """
    given = strategy.fill_config() if isinstance(strategy, FillsConfig) else {}
    unset = {key for key in given if key not in config.model_fields_set or getattr(config, key) == "auto"}
    unset -= {"nproc"} if started is not None else set()
    return config.model_copy(update={key: given[key] for key in unset})


def build_strategy(config: RunConfig) -> object:
    """Import the strategy that the config names, and build it from its options; raises StrategyError."""
    cls = registry.load("strategies", config.strategy)
    return build("strategy", config.strategy, cls, config.strategy_options)


def load_task(config: RunConfig) -> Task:
    """Import the task that the config names, and build it from its options; raises StrategyError."""
    if config.task.startswith(GIVEN):
        raise StrategyError(
            f"task {config.task!r}: was given to train() as an object, which cannot be built again; name it with "
            "--task file.py:Class, or by an entry point"
        )
    cls = registry.load("tasks", config.task)
    task: Task = build("task", config.task, cls, config.task_options)
    return task


def _with_task(config: RunConfig, given: Task | None) -> tuple[RunConfig, Task]:
    """Return ``config`` with all options of its task filled in, and the task: ``given``, or what the config names."""
    task = given or load_task(config)
    if given is None:
        return config.model_copy(update={"task_options": values_of(task)}), task
    try:
        name, options = _name_of(given, config.task), values_of(given)
    except TypeError:  # some field has no form in a config file
        name, options = _as_given(given), {}
    if config.task_options and config.task_options != options:
        option = next(iter(config.task_options))
        raise ConfigError(f"task_options.{option}: train() was given a task, which has its options already")
    return config.model_copy(update={"task": name, "task_options": options}), task


def _name_of(task: Task, configured: str) -> str:
    """Return how a config names a task that was given as an object; ``configured`` is the name that the user set."""
    cls = type(task)
    if configured.startswith(GIVEN):
        return configured
    if configured != DEFAULT_TASK:
        named = registry.load("tasks", configured)
        if named.__name__ != cls.__name__:  # not the class itself: a script's stands in __main__
            raise ConfigError(f"task = {configured!r}: is {named.__name__}, but train() was given {cls.__name__}")
        return configured
    target = f"{cls.__module__}:{cls.__qualname__}"
    entries = registry.entries("tasks").items()
    return next((name for name, entry in entries if entry.value == target), _as_given(task))


def _as_given(task: Task) -> str:
    # Without the module: a class of a script stands in __main__, and elsewhere under the script's name.
    return f"{GIVEN}{type(task).__qualname__}"


def data_shards(config: RunConfig, declared: Capabilities, world_size: int) -> int:
    """Return how many data shards ``world_size`` ranks make; raises ConfigError where some ranks would be left over."""
    shards, left_over = divmod(world_size, declared.ranks_per_shard)
    if left_over:
        unit = declared.ranks_per_shard
        raise ConfigError(
            f"nproc = {world_size}: under strategy {config.strategy!r} {unit} ranks train on the same rows, so their "
            f"number must be a multiple of {unit}; nearest possible: {_nearest_multiples(world_size, unit)}"
        )
    return shards


def check_micro_batch_size(config: RunConfig, shards: int) -> None:
    """Raise ConfigError unless the global batch is a multiple of micro-batch times data shards."""
    whole, micro = config.global_batch_size, config.micro_batch_size
    if micro != "auto" and micro < 1:
        raise ConfigError(f"micro_batch_size = {micro}: must be at least 1")
    unit = shards * (1 if micro == "auto" else micro)
    if whole % unit:
        raise ConfigError(
            f"global_batch_size = {whole}: must be a multiple of micro_batch_size * ranks = {micro} * {shards} = "
            f"{unit}; nearest possible: {_nearest_multiples(whole, unit)}{_ranks_that_go(config, shards)}"
        )


def check_out(config: RunConfig) -> None:
    """Raise ConfigError if the run folder cannot be created, or has a run that this one does not resume.

    Creates nothing: a run that is refused for another reason must not leave a folder behind.
    """
    folder = Path(str(config.out))
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out = {str(folder)!r}: is a file, not a folder")
    resumed = config.resume == "auto" or (config.resume and folder.resolve() in Path(config.resume).resolve().parents)
    if (folder / "config.yaml").exists() and not resumed:
        raise ConfigError(f"out = {str(folder)!r}: holds another run; choose another, or go on with --resume auto")
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(f"out = {str(folder)!r}: cannot be created: {above} is not a folder that you may write to")


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return ", ".join(str(size) for size in (below, below + unit) if size)


def _ranks_that_go(config: RunConfig, shards: int) -> str:
    """Return a hint with the numbers of ranks, below and above, that the global batch can be divided among."""
    whole, micro = config.global_batch_size, 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    each = max(1, int(config.nproc) // shards)  # ranks of one data shard
    parts = 0 if whole % micro else min(whole // micro, MOST_RANKS)
    possible = [size for size in range(1, parts + 1) if whole // micro % size == 0]
    sizes = [*[size for size in possible if size < shards][-1:], *[size for size in possible if size > shards][:1]]
    return f"; {whole} goes with {' or '.join(str(size * each) for size in sizes)} rank(s)" if sizes else ""


def _world_size(config: RunConfig, declared: Capabilities, device: str, started: int | None) -> int:
    asked = config.nproc
    if asked != "auto" and asked < 1:
        raise ConfigError(f"nproc = {asked}: must be at least 1")
    if started is not None:
        if asked not in ("auto", started):
            raise ConfigError(f"nproc = {asked}: the launcher started {started} ranks; leave out --nproc")
        size = started
    elif asked == "auto":
        size = count_devices(device) if device != "cpu" and declared.processes == "many" else 1
    else:
        size = asked
    if declared.processes == "one" and size > 1:
        others = strategies_that(lambda other: other.processes == "many")
        raise ConfigError(f"nproc = {size}: strategy {config.strategy!r} runs in one process; {others} can use several")
    if device != "cpu" and started is None and size > count_devices(device):
        here = f"torch sees {count_devices(device)} of kind {device!r} here"
        raise ConfigError(f"nproc = {size}: one device for each rank, and {here}; use fewer ranks or --device cpu")
    return size


def _precision(config: RunConfig, declared: Capabilities) -> str:
    """Return the precision; for 'auto' bf16 if the device is fast in it and the strategy declares no problem with it.

    For an accelerator only its rank can tell, in ``device_of``; here every one counts as fast.
    """
    if config.precision != "auto":
        return config.precision
    fast = config.device != "cpu" or has_fast_bf16()
    return "bf16" if fast and "bf16" in declared.precisions and "bf16" not in declared.exempt else "fp32"


def _best_metric(config: RunConfig, task: Task) -> str | None:
    """Return the metric of ``checkpoints.best``; for 'auto' the loss, or the first that the task declares."""
    best, metrics = config.checkpoints.best, declared_metrics(task)
    if best == "auto":
        best = "loss" if "loss" in metrics else next(iter(metrics), None)
    if best is None and config.patience:
        raise ConfigError(f"patience = {config.patience}: needs a metric to judge by; name one by checkpoints.best")
    if best is not None and best not in metrics:
        known = ", ".join(metrics) or "none"
        raise ConfigError(
            f"checkpoints.best = {best!r}: no metric of task {config.task!r}{nearest(best, metrics)} (metrics: {known})"
        )
    return best


def _learning_rate(config: RunConfig, task: Task) -> float:
    if config.lr == "auto":
        suggested = task.suggest(config).get("lr") if isinstance(task, Suggests) else None
        if not isinstance(suggested, float):
            raise ConfigError(f"lr = 'auto': task {type(task).__name__} suggests none; give one with --lr")
        return suggested
    if config.lr <= 0:
        raise ConfigError(f"lr = {config.lr}: must be greater than 0")
    return config.lr


def _new_run_folder(config: RunConfig) -> str:
    """Return a new folder name: the time, and a number if another run started in the same second."""
    task = re.sub(r"[^\w-]+", "-", Path(config.task).name.removeprefix(GIVEN).replace(".py:", "-"))
    base = Path("runs") / f"{task}-{config.strategy}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return str(folder)
