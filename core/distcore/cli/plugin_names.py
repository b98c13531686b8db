"""Names of plugins are checked before torch is imported, so that a slip is told at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distcore import registry
from distcore.errors import ConfigError
from distcore.hints import how_to_get, nearest
from distcore.model.schedules import check_schedule_name
from distcore.plugin.task.task import check_early

if TYPE_CHECKING:
    from distcore.config import RunConfig

ALONE = "single"
"""The core's own strategy, which takes the optimizers that are installed, and no others."""


def check_names(strategy: str | None, task: str | None, schedule: str | None) -> None:
    """Raise StrategyError, one line, if the strategy, the task or the schedule is not installed.

    ``None``: none is named. In a rank that a launcher started nothing is checked: of several ranks
    only one is to print the line, which the job sees to.
    """
    is_task_named = task not in (None, "auto")
    if strategy is None and schedule is None and not is_task_named:
        return
    from distcore.rank_environment import join

    if join(os.environ) is not None:
        return
    if strategy is not None:
        registry.check_name("strategies", strategy.partition(":")[0])
    if is_task_named:
        registry.check_name("tasks", str(task))
    if schedule is not None:
        check_schedule_name(schedule)


def check_config(config: RunConfig) -> None:
    """Raise DistcoreError for what a config names and what is not there: plugins, and files of
    the task's data.
    """
    check_names(config.strategy, config.task, config.schedule.name)
    _check_optimizer_name(config.optimizer.name, config.strategy)
    if ".py:" not in config.task:  # whose file may import torch
        from distcore.config.short_keys import task_class

        check_early(task_class(config.task), config.task_options)


def _check_optimizer_name(name: str, strategy: str) -> None:
    """Raise DistcoreError for a slip in the name of an optimizer.

    Any other name may be that of a strategy's own optimizer: only its capabilities can tell which
    strategy that is, and they import torch.
    """
    if ".py:" in name:
        registry.check_name("optimizers", name)
        return
    installed = sorted(registry.offers("optimizers"))
    hint = nearest(name, installed)
    is_shipped = how_to_get("optimizers", name) is not None
    if hint and strategy == ALONE and name not in installed and not is_shipped:
        raise ConfigError(
            f"optimizer.name = {name!r}: strategy {strategy!r} takes {', '.join(installed)}{hint}"
        )
