"""Resolve a config: replace every 'auto', and refuse what cannot work before any process starts."""

from __future__ import annotations

from distcore import registry
from distcore.config import DEFAULT_TASK, GIVEN, RunConfig
from distcore.distributed.devices import check_deterministic, has_fast_bf16, resolve_device
from distcore.errors import ConfigError, StrategyError, nearest
from distcore.model.lora import resolve_lora
from distcore.model.optim import check_freeze, check_schedule
from distcore.plugin.options import build, values_of
from distcore.plugin.strategy.argument import expand_shorthand
from distcore.plugin.strategy.capabilities import Capabilities, ChecksConfig, ChecksEvaluation, FillsConfig
from distcore.plugin.strategy.hooks import capabilities_of
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Task
from distcore.resolve.check_capabilities import check_average, check_declared, compiled, with_optimizer
from distcore.resolve.micro_batches import micro_batch_tokens, with_forward_tokens, with_length_grouping
from distcore.resolve.run_folder import new_run_folder
from distcore.resolve.world_size import check_micro_batch_size, data_shards, world_size


def resolve(
    config: RunConfig,
    nproc: int | None = None,
    launcher: str = "local",
    training: bool = True,
    task: Task | None = None,
    elsewhere: bool = False,
) -> RunConfig:
    """Return ``config`` with every 'auto' replaced that does not need the data, after checking all values.

    ``nproc`` is the number of ranks if ``launcher`` has already started them. With ``training=False`` the run only
    evaluates: the optimizer and the schedule, which belong to the run that trained, are not checked. ``task`` replaces
    the task that the config names. ``elsewhere``: nothing will run here, so the device need not be here. Raises
    DistcoreError, one line.
    """
    if config.resume == "auto" and config.out is None:
        raise ConfigError("resume = 'auto': needs --out, the folder of the run to continue")
    config = expand_shorthand(config)
    config, task = _with_task(config, task)
    strategy = build_strategy(config)
    config = _filled(config, strategy, nproc)
    declared = capabilities_of(config.strategy, strategy)
    device = resolve_device(config, elsewhere)
    config = config.model_copy(update={"nproc": world_size(config, declared, device, nproc), "device": device})
    config = config.model_copy(update={"precision": _precision(config, declared)})  # after the device: it depends on it
    config = config.model_copy(update={"loader": with_length_grouping(config, task)})
    check_declared(config, declared, launcher)
    check_deterministic(config)
    if training:
        config = with_optimizer(config, declared)
        check_average(config, declared)
        check_schedule(config)
        check_freeze(config)
        config = compiled(config, declared)
    check_micro_batch_size(config, data_shards(config, declared, int(config.nproc)))
    config = config.model_copy(
        update={
            "micro_batch_tokens": micro_batch_tokens(config),
            "loader": with_forward_tokens(config, declared),
            "lr": _learning_rate(config, task),
            "lora": resolve_lora(config),
            "checkpoints": config.checkpoints.model_copy(update={"best": _best_metric(config, task)}),
            "out": config.out or new_run_folder(config),
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
    best, metrics = config.checkpoints.best, BoundTask.of(task).declared_metrics
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
        suggested = BoundTask.of(task).suggest(config).get("lr")
        if not isinstance(suggested, float):
            raise ConfigError(f"lr = 'auto': task {type(task).__name__} suggests none; give one with --lr")
        return suggested
    if config.lr <= 0:
        raise ConfigError(f"lr = {config.lr}: must be greater than 0")
    return config.lr
