"""Whether rows are computed without padding: chosen by their lengths, before the model is built."""

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

__all__ = ["PADDED", "choose_padding_free", "padding_free_alternatives", "rows_as_computed"]
"""The names that any distribution may import."""
STEPS = 8
"""Number of first steps whose cost decides."""
GAIN = 0.05
"""Smallest relative saving of cost; below it, padding-free rows were not measured to be faster."""
PADDED = {"padding_free": "off"}
"""Changes of a config that make rows padded."""


@dataclass(frozen=True, slots=True)
class PaddingFreeChoice:
    """How ``padding_free`` was chosen."""

    requested: str
    """``padding_free`` as the user set it."""
    why: str
    """Reason for the choice if the user left it open, for the log."""


def choose_padding_free(
    config: RunConfig, declared: Capabilities, task: Task, data: Datasets
) -> tuple[RunConfig, PaddingFreeChoice]:
    """Return ``config`` with ``padding_free`` on or off, and how that was chosen.

    Raises ConfigError if it cannot be on. A function of config and lengths, so
    every rank chooses alike.
    """
    bound = BoundTask.wrap(task)
    suggested = bound.suggest(config) if config.padding_free == "auto" else {}
    requested = str(suggested.get("padding_free", config.padding_free))
    own = own_padding(data.train)
    # the task has chosen
    if requested != "off" and own is not None and not bound.computes_padding_free:
        padded = own
        why = ""
    else:
        padded, why = _is_padded(requested, config, declared, bound, data)
    return with_padding(config, padded), PaddingFreeChoice(requested, why)


def _is_padded(
    requested: str, config: RunConfig, declared: Capabilities, task: BoundTask, data: Datasets
) -> tuple[bool, str]:
    """Return True if rows are padded, and why; the reason is empty where the user has decided."""
    if requested == "off":
        return True, ""
    reason = why_unsupported(config, declared, task)
    if requested == "on":
        if reason:
            raise ConfigError(f"padding_free = 'on': {reason}; use --padding-free off")
        return False, ""
    if not reason and config.device != "cpu":
        reason = f"not measured on {config.device}; --padding-free on does it"
    if reason:
        return True, reason
    shards = 1
    # Under ``exact`` the choice is part of the arithmetic: no number of ranks has a part in it.
    if config.nproc != "auto" and config.exact is None:
        shards = max(1, int(config.nproc) // declared.ranks_per_shard)
    cost_padded = _cost(config, data.train, shards)
    unpadded = with_padding(config, padded=False)
    cost_unpadded = _cost(unpadded, data.train, shards, task.skipped_fraction())
    if cost_unpadded <= (1 - GAIN) * cost_padded:
        saved = 1 - cost_unpadded / cost_padded
        return False, f"spares {saved:.0%} of a step's estimated cost"
    return True, "it would save too little" if cost_padded else "there are no rows"


def why_unsupported(config: RunConfig, declared: Capabilities, task: Task) -> str | None:
    """Return why the rows of a task cannot be computed without padding; ``None`` if they can."""
    bound = BoundTask.wrap(task)
    if not bound.computes_padding_free:
        return f"task {config.task!r} has no form without padding"
    if config.compile == "on":
        return "with compile = 'on' each step would be compiled anew, with 'regions' it would not"
    if declared.ranks_per_shard > 1:
        return f"strategy {config.strategy!r} computes a row on several ranks"
    return bound.why_not_padding_free()


def is_supported(task: Task) -> bool:
    """Return True if the model of a task can compute rows with and without padding."""
    return BoundTask.wrap(task).why_not_padding_free() is None


def with_padding(config: RunConfig, padded: bool) -> RunConfig:
    """Return ``config`` with ``padding_free`` off if rows are ``padded``, else on."""
    return with_changes(config, {"padding_free": "off" if padded else "on"})


def as_requested(config: RunConfig, choice: PaddingFreeChoice) -> RunConfig:
    """Return ``config`` with ``padding_free`` as the user set it."""
    return with_changes(config, {"padding_free": choice.requested})


def padding_free_alternatives(config: RunConfig) -> list[dict[str, str]]:
    """Return the other values of ``padding_free``, each as changes of a config in which it
    is chosen.
    """
    return [{"padding_free": value} for value in ("on", "off") if value != config.padding_free]


def rows_as_computed(config: RunConfig, dataset: Dataset) -> Dataset:
    """Return the rows as the run of ``config`` computes them: padded, if the config pads and the
    dataset has padded rows.
    """
    return padded_rows(dataset) or dataset if config.pads_rows else dataset


def set_padding_free(config: RunConfig, task: Task, module: nn.Module) -> None:
    """Have ``module`` compute rows without padding, if the config does."""
    if not config.pads_rows:
        BoundTask.wrap(task).enable_padding_free(module)


def _cost(config: RunConfig, dataset: Dataset, shards: int, skipped_fraction: float = 0.0) -> float:
    """Return the estimated cost of the first steps for one data shard, in tokens.

    ``skipped_fraction`` is the part of each token's cost that the model does not compute.
    """
    if not len(dataset):
        return 0
    plan = training_plan(config, dataset)
    forward_tokens = config.loader.forward_tokens
    cost_of_pass = forward_tokens if isinstance(forward_tokens, int) else 0
    is_padded = pads(dataset, config)
    cost = 0.0
    for step in range(min(STEPS, plan.steps)):
        for micro in plan.split(0, step, 0, shards):
            lengths = read(dataset.lengths, micro.indices)
            tokens = len(lengths) * lengths.max() if is_padded else lengths.sum()
            cost += (1 - skipped_fraction) * int(tokens) + cost_of_pass
    return cost
