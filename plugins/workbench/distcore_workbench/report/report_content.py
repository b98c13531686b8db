"""The content of a report, read from the folders of the runs, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore import ConfigError
from distcore_workbench.observe.goodput import goodput_of
from distcore_workbench.pages.document import command_line
from distcore_workbench.report.curves import Chart, charts_of, lines_of
from distcore_workbench.report.folders import RunFolder, names_of, read
from distcore_workbench.report.predictions import Answers, answers_of
from distcore_workbench.report.side_by_side import Facts, facts_of

HEADLINE = (
    "task",
    "task_options.model",
    "task_options.data",
    "global_batch_size",
    "strategy",
    "precision",
)
"""Keys of the config that describe a run in a line, as far as its task has them."""


class NoStepError(ConfigError):
    """None of the runs has logged a step yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The content of a report."""

    facts: Facts
    """The runs side by side: metrics of the final test, speed, memory, differing settings."""
    charts: tuple[Chart, ...]
    """The curves of all runs together."""
    answers: tuple[Answers | None, ...]
    """The predictions of each run; ``None`` where it has none."""
    about: str
    """The common settings of the runs, in a line."""
    remarks: tuple[str, ...]
    """Warnings for the reader, one line each."""
    time_remarks: tuple[str, ...] = ()
    """Where the time of each observed run went, one line each."""

    @property
    def main_charts(self) -> list[Chart]:
        """The loss, and what evaluations have measured; all charts where there is no such one."""
        main = [chart for chart in self.charts if chart.is_of_results]
        return main or list(self.charts)

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [str(run["name"]) for run in self.facts["runs"]]


def content_of(folders: Sequence[Path]) -> Content:
    """Read the runs.

    Raises ConfigError, one line, for a file that is damaged and if no run has a step yet.
    """
    runs = [read(folder) for folder in folders]
    lines = [lines_of(run.folder, run.config) for run in runs]
    charts = charts_of(lines, [evaluation_data(run) for run in runs])
    if not charts:
        raise NoStepError(f"report {folders[0]}: no step is logged yet; --follow waits for it")
    names = names_of(folders)
    facts = facts_of(runs, command_line())
    time_remarks = []
    unstarted_remarks = []
    for name, run, lines_of_run in zip(names, runs, lines, strict=True):
        goodput = goodput_of(run.folder)
        if goodput is not None:
            time_remarks.append(f"{name}: {goodput}")
        if not lines_of_run:
            unstarted_remarks.append(f"{name}: no step is logged yet")
    subject = names[0] if len(names) == 1 else f"{len(names)} runs"
    return Content(
        facts=facts,
        charts=tuple(charts),
        answers=tuple(answers_of(run.folder) if run.report else None for run in runs),
        about=f"{subject}: {', '.join(_about(runs))}",
        remarks=(*facts["notes"], *unstarted_remarks),
        time_remarks=tuple(time_remarks),
    )


def evaluation_data(run: RunFolder) -> Mapping[str, Any]:
    """Return the facts of the evaluation data in the report; empty if the run is not finished.

    The names of facts of evaluation sets begin with ``NAME/``.
    """
    data = run.report.get("data")
    if not isinstance(data, Mapping):
        return {}
    facts = data.get("evaluation")
    if isinstance(facts, Mapping):
        return facts
    facts_of_sets = {}
    for set_name in run.report.get("evaluations", {}):
        for key, value in data.get(f"evaluation.{set_name}", {}).items():
            facts_of_sets[f"{set_name}/{key}"] = value
    return facts_of_sets


def _about(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Yield the common settings of all runs."""
    first, *others = [run.values for run in runs]
    for key in (*HEADLINE, "nproc"):
        value = first.get(key)
        if value and all(values.get(key) == value for values in others):
            if key == "nproc":
                yield "1 rank" if value == 1 else f"{value} ranks"
            else:
                yield f"{key.rpartition('.')[2].replace('_', ' ')} {value}"
