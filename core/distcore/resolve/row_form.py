"""The form in which rows are computed, padded or padding-free: chosen by their lengths, before
the model is built.
"""

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

__all__ = ["PADDED", "choose_form", "other_forms", "rows_in_form"]
"""The names that any distribution may import."""
STEPS = 8
"""Number of first steps whose cost decides."""
GAIN = 0.05
"""Smallest relative saving of cost; below it, padding-free rows were not measured to be faster."""
PADDED = {"padding_free": "off"}
"""Changes of a config that make rows padded."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the form of the rows was chosen."""

    asked: str
    """``padding_free`` as the user asked for it."""
    why: str
    """Reason for the choice if the user left it open, for the log."""


def choose_form(
    config: RunConfig, declared: Capabilities, task: Task, data: Datasets
) -> tuple[RunConfig, Form]:
    """Return ``config`` with ``padding_free`` on or off, and how that was chosen.

    Raises ConfigError if it cannot be on. A function of config and lengths, so
    every rank chooses alike.
    """
    bound = BoundTask.wrap(task)
    suggested = bound.suggest(config) if config.padding_free == "auto" else {}
    asked = str(suggested.get("padding_free", config.padding_free))
    own = own_padding(data.train)
    # the task has chosen
    if asked != "off" and own is not None and not bound.computes_padding_free:
        padded, why = own, ""
    else:
        padded, why = _is_padded(asked, config, declared, bound, data)
    return with_form(config, padded), Form(asked, why)


def _is_padded(
    asked: str, config: RunConfig, declared: Capabilities, task: BoundTask, data: Datasets
) -> tuple[bool, str]:
    if asked == "off":
        return True, ""
    reason = why_not(config, declared, task)
    if asked == "on":
        if reason:
            raise ConfigError(f"padding_free = 'on': {reason}; use --padding-free off")
        return False, ""
    if not reason and config.device != "cpu":
        reason = f"not measured on {config.device}; --padding-free on does it"
    if reason:
        return True, reason
    shards = max(1, int(config.nproc) // declared.ranks_per_shard) if config.nproc != "auto" else 1
    padded = _cost(config, data.train, shards)
    free = _cost(with_form(config, padded=False), data.train, shards, task.skipped_fraction())
    if free <= (1 - GAIN) * padded:
        return False, f"spares {1 - free / padded:.0%} of a step's estimated cost"
    return True, "it would save too little" if padded else "there are no rows"


def why_not(config: RunConfig, declared: Capabilities, task: Task) -> str | None:
    """Return why the rows of a task cannot be computed without padding; ``None`` if they can."""
    bound = BoundTask.wrap(task)
    if not bound.computes_padding_free:
        return f"task {config.task!r} has no form without padding"
    if config.compile == "on":
        return "with compile = 'on' each step would be compiled anew, with 'regions' it would not"
    if declared.ranks_per_shard > 1:
        return f"strategy {config.strategy!r} computes a row on several ranks"
    return bound.why_not_padding_free()


def has_both(task: Task) -> bool:
    """Return True if the model of a task can compute rows with and without padding."""
    return BoundTask.wrap(task).why_not_padding_free() is None


def with_form(config: RunConfig, padded: bool) -> RunConfig:
    """Return ``config`` with ``padding_free`` as its model computes rows."""
    return with_changes(config, {"padding_free": "off" if padded else "on"})


def as_asked(config: RunConfig, form: Form) -> RunConfig:
    """Return ``config`` with ``padding_free`` as the user asked for it."""
    return with_changes(config, {"padding_free": form.asked})


def other_forms(config: RunConfig) -> list[dict[str, str]]:
    """Return the other values of ``padding_free``, each as changes of a config
    with a chosen form.
    """
    return [{"padding_free": value} for value in ("on", "off") if value != config.padding_free]


def rows_in_form(config: RunConfig, dataset: Dataset) -> Dataset:
    """Return the rows in the form of ``config``: padded, if the config pads and the dataset
    has a padded form.
    """
    return padded_rows(dataset) or dataset if config.pads_rows else dataset


def set_form(config: RunConfig, task: Task, module: nn.Module) -> None:
    """Set ``module`` to the row form of ``config``."""
    if not config.pads_rows:
        BoundTask.wrap(task).enable_padding_free(module)


def _cost(config: RunConfig, dataset: Dataset, shards: int, skipped_fraction: float = 0.0) -> float:
    if not len(dataset):
        return 0
    plan, cost = training_plan(config, dataset), 0.0
    forward = config.loader.forward_tokens
    padded = pads(dataset, config)
    for step in range(min(STEPS, plan.steps)):
        for micro in plan.split(0, step, 0, shards):
            lengths = read(dataset.lengths, micro.indices)
            tokens = len(lengths) * lengths.max() if padded else lengths.sum()
            cost += (1 - skipped_fraction) * int(tokens) + (
                forward if isinstance(forward, int) else 0
            )
    return cost
