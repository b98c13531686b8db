"""The form in which rows are computed, padded or padding-free: chosen by their lengths, before the model is built."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from distcore.config import RunConfig, with_changes
from distcore.errors import ConfigError
from distcore.plugin.batching.columns import read
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.datasets import own_padding, padded_rows, pads
from distcore.plugin.task.task import Dataset, Datasets, Task

STEPS = 8
"""First steps whose cost says whether it gains."""
GAIN = 0.05
"""Least part of that cost that it must save: below it was not measured to be faster."""
PADDED = {"padding_free": "off"}
"""What has rows padded, as changes of a config."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the form of the rows was chosen."""

    asked: str
    """``padding_free`` as the user asked for it."""
    why: str
    """Why it is what it is where the user left that open, for the log."""


def choose(config: RunConfig, declared: Capabilities, task: Task, data: Datasets) -> tuple[RunConfig, str]:
    """Return ``config`` with ``padding_free`` on or off, and why where it was 'auto'.

    Raises ConfigError if it cannot be on. A function of config and lengths, so every rank chooses alike.
    """
    if (wanted := asked(config, task)) != config.padding_free:
        config = with_changes(config, {"padding_free": wanted})
    if wanted == "off":
        return config, ""
    own = own_padding(data.train)
    if own is not None and not BoundTask.of(task).computes_padding_free:  # the task has chosen
        return with_changes(config, {"padding_free": "off" if own else "on"}), ""
    reason = why_not(config, declared, task)
    if config.padding_free == "on":
        if reason:
            raise ConfigError(f"padding_free = 'on': {reason}; use --padding-free off")
        return config, ""
    if not reason and config.device != "cpu":
        reason = f"not measured on {config.device}; --padding-free on does it"
    on = with_changes(config, {"padding_free": "on"})
    if not reason:
        shards = max(1, int(config.nproc) // declared.ranks_per_shard) if config.nproc != "auto" else 1
        skipped = BoundTask.of(task).skipped_fraction()
        padded, free = _cost(config, data.train, shards), _cost(on, data.train, shards, skipped)
        if free <= (1 - GAIN) * padded:
            return on, f"spares {1 - free / padded:.0%} of a step's estimated cost"
        reason = "it would save too little" if padded else "there are no rows"
    return with_changes(config, {"padding_free": "off"}), reason


def asked(config: RunConfig, task: Task) -> str:
    """Return ``padding_free``, or what the task suggests if that is 'auto'."""
    given = config.padding_free
    return str(BoundTask.of(task).suggest(config).get("padding_free", given)) if given == "auto" else given


def why_not(config: RunConfig, declared: Capabilities, task: Task) -> str | None:
    """Return why the rows of a task cannot be computed without padding; ``None`` if they can."""
    bound = BoundTask.of(task)
    if not bound.computes_padding_free:
        return f"task {config.task!r} has no form without padding"
    if config.compile != "off":
        return f"with compile = {config.compile!r} each step would be compiled anew"
    if declared.ranks_per_shard > 1:
        return f"strategy {config.strategy!r} computes a row on several ranks"
    return bound.why_not_padding_free()


def has_both(task: Task) -> bool:
    """Return True if the model of a task can compute rows with and without padding."""
    return BoundTask.of(task).why_not_padding_free() is None


def with_form(config: RunConfig, padded: bool) -> RunConfig:
    """Return ``config`` with ``padding_free`` as its model computes rows."""
    return with_changes(config, {"padding_free": "off" if padded else "on"})


def as_asked(config: RunConfig, form: Form) -> RunConfig:
    """Return ``config`` with ``padding_free`` as the user asked for it."""
    return with_changes(config, {"padding_free": form.asked})


def other_forms(config: RunConfig) -> list[dict[str, str]]:
    """Return the other values of ``padding_free``, each as changes of a config of which the form was chosen."""
    return [{"padding_free": value} for value in ("on", "off") if value != config.padding_free]


def rows_in_form(config: RunConfig, dataset: Dataset) -> Dataset:
    """Return the rows as ``config`` has them: padded unless it is without padding, if they are the same then."""
    return padded_rows(dataset) or dataset if config.pads_rows else dataset


def set_form(config: RunConfig, task: Task, module: nn.Module) -> None:
    """Have ``module`` compute rows in the form of ``config``."""
    if not config.pads_rows:
        BoundTask.of(task).enable_padding_free(module)


def _cost(config: RunConfig, dataset: Dataset, shards: int, skipped_fraction: float = 0.0) -> float:
    """Return what the first steps cost the first data shard, in tokens, as the cut of steps counts it."""
    if not len(dataset):
        return 0
    plan, cost = training_plan(config, dataset), 0.0
    forward = config.loader.forward_tokens
    padded = pads(dataset, config)
    for step in range(min(STEPS, plan.steps)):
        for micro in plan.split(0, step, 0, shards):
            lengths = read(dataset.lengths, micro.indices)
            tokens = len(lengths) * lengths.max() if padded else lengths.sum()
            cost += (1 - skipped_fraction) * int(tokens) + (forward if isinstance(forward, int) else 0)
    return cost
