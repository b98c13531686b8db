"""Names of plugins are checked before torch is imported, so that a slip is told at once."""

from __future__ import annotations

import os

from distcore import registry
from distcore.model.schedules import check_schedule_name


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
