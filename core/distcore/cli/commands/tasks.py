"""``distcore tasks``: list the installed tasks with their metrics, or show the
options of one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from distcore.cli.plugins_table import Description, PluginsTable
from distcore.cli.plugins_table import add_arguments as add_arguments

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "list the installed tasks and their metrics, or the options of one"


class TasksTable(PluginsTable):
    """The subject of each task, and its metrics. Imports no torch."""

    group, kind = "tasks", "task"
    unusable: ClassVar[Description] = {"about": "", "metrics": {}}

    def facts(self, name: str, cls: type[object]) -> Description:
        """Return the first sentence of the task's docstring, and its metrics."""
        from distcore.cli.task_flags import first_sentence
        from distcore.plugin.task.task import declared_metrics

        return {"about": first_sentence(cls), "metrics": dict(declared_metrics(cls))}

    def cells(self, facts: Description) -> dict[str, str]:
        """Return the metrics in words, and the sentence."""
        from distcore.cli.task_flags import metrics_in_words

        return {"metrics": metrics_in_words(facts["metrics"]), "about": facts["about"]}

    def print_overview(
        self, console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        """Print one row per task; its sentence may break."""
        from distcore.cli.tables import print_described

        print_described(console, headings, rows)


run = TasksTable().run
