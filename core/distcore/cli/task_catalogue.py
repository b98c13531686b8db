"""What ``distcore tasks`` says of a task, and ``distcore train --task NAME --help`` too. Imports no torch."""

from __future__ import annotations

import inspect

from rich.console import Console

from distcore.cli.catalogue import Catalogue, Description, described, how_to_set, show_options
from distcore.plugin.task.bound import declared_metrics
from distcore.tables import print_described

ARROWS = {"min": "↓", "max": "↑"}


def help_of(name: str, width: int) -> str:
    """Return what ``--help`` says of the task, in lines of at most ``width``; raises DistcoreError if there is none."""
    (facts,) = described(CATALOGUE, name)
    console = Console(width=width, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(f"task {name}: {facts['about']}", markup=False)
        best = "the best of one is kept with --set checkpoints.best=NAME"
        console.print(f"metrics: {_metrics(facts)}; {best}", markup=False)
        console.print(how_to_set(CATALOGUE), markup=False)
        show_options(console, CATALOGUE, facts)
    return captured.get()


def _facts(name: str, cls: type[object]) -> Description:
    about = (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "").partition(";")[0].rstrip(".")
    return {"about": about, "metrics": dict(declared_metrics(cls))}


def _cells(facts: Description) -> dict[str, str]:
    return {"metrics": _metrics(facts), "about": facts["about"]}


def _metrics(facts: Description) -> str:
    return " ".join(f"{name} {ARROWS[direction]}" for name, direction in facts["metrics"].items()) or "none"


CATALOGUE = Catalogue(
    group="tasks",
    unknown={"about": "", "metrics": {}},
    facts=_facts,
    cells=_cells,
    remarks=lambda facts: (),
    table=print_described,
)
