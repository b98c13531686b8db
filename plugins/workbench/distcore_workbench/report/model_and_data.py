"""The content of a report, the same for the terminal and the page: read from the folders of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distcore import ConfigError
from distcore_workbench.report.curves import Chart, charts_of, lines_of
from distcore_workbench.report.folders import RunFolder, names_of, read
from distcore_workbench.report.predictions import Confusion, answers_of
from distcore_workbench.report.report_page import command_line
from distcore_workbench.report.side_by_side import Facts, facts_of

HEADLINE = ("task", "task_options.model", "task_options.data", "global_batch_size", "strategy", "precision")
"""Keys of the config that say in a line what a run is, as far as its task has them."""


class NoStepError(ConfigError):
    """None of the runs has logged a step yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a report shows."""

    facts: Facts
    """The runs side by side: metrics of the final test, speed, memory, and where the configs differ."""
    charts: tuple[Chart, ...]
    """Of all runs together."""
    answers: tuple[Confusion | list[dict[str, str]] | None, ...]
    """By run."""
    about: tuple[str, ...]
    """What each run is, in a line."""
    remarks: tuple[str, ...]
    """What a reader must know, one line each."""

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [str(run["name"]) for run in self.facts["runs"]]


def content_of(folders: Sequence[Path]) -> Content:
    """Read the runs; raises ConfigError, one line, for a file that is damaged and if no run has a step yet."""
    runs = [read(folder) for folder in folders]
    lines = [lines_of(run.folder, run.config) for run in runs]
    charts = charts_of(lines)
    if not charts:
        raise NoStepError(f"report {folders[0]}: no step is logged yet; --follow waits for it")
    names = names_of(folders)
    facts = facts_of(runs, command_line())
    late = [f"{name}: no step is logged yet" for name, logged in zip(names, lines, strict=True) if not logged]
    return Content(
        facts=facts,
        charts=tuple(charts),
        answers=tuple(answers_of(run.folder) if run.report else None for run in runs),
        about=tuple(f"{name}: {', '.join(_about(run))}" for name, run in zip(names, runs, strict=True)),
        remarks=(*facts["notes"], *late),
    )


def _about(run: RunFolder) -> Iterator[str]:
    values = run.values
    yield from (f"{key.rpartition('.')[2].replace('_', ' ')} {values[key]}" for key in HEADLINE if values.get(key))
    yield f"{values['nproc']} rank{'s' * (values['nproc'] != 1)}"
