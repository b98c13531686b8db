"""What ``distcore tasks`` says of a task. Imports no torch."""

from __future__ import annotations

from distcore.cli.catalogue import Catalogue, Description
from distcore.cli.task_flags import first_sentence, metrics_in_words
from distcore.plugin.task.task import declared_metrics
from distcore.tables import print_described


def _facts(name: str, cls: type[object]) -> Description:
    return {"about": first_sentence(cls), "metrics": dict(declared_metrics(cls))}


def _cells(facts: Description) -> dict[str, str]:
    return {"metrics": metrics_in_words(facts["metrics"]), "about": facts["about"]}


CATALOGUE = Catalogue(
    group="tasks",
    unknown={"about": "", "metrics": {}},
    facts=_facts,
    cells=_cells,
    remarks=lambda facts: (),
    table=print_described,
)
