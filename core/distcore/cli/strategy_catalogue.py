"""What ``distcore strategies`` says of a strategy: what it declares, and which option has a short form."""

from __future__ import annotations

import dataclasses
from typing import Any

from distcore.cli.catalogue import Catalogue, Description
from distcore.plugin.strategy.argument import shorthand_of
from distcore.resolve import strategies
from distcore.tables import print_cells


def _facts(name: str, cls: type[object]) -> Description:
    declared = dataclasses.asdict(strategies.named(name, {}).capabilities)
    return {"shorthand": shorthand_of(name, cls), "declares": {key: _json(value) for key, value in declared.items()}}


def _json(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _cells(facts: Description) -> dict[str, str]:
    declared = facts["declares"]
    return {
        "ranks": declared["processes"],
        "devices": " ".join(declared["devices"] or ["any"]),
        "precision": " ".join(declared["precisions"]),
        "shards": "yes" if declared["shards_parameters"] else "no",
        "gradients": declared["gradients"],
        "owns": " ".join(declared["owns"]) or "-",
    }


def _remarks(facts: Description) -> list[str]:
    return [f"limit: {limit}" for limit in facts["declares"]["limits"]]


CATALOGUE = Catalogue(
    group="strategies",
    unknown={"shorthand": None, "declares": None},
    facts=_facts,
    cells=_cells,
    remarks=_remarks,
    table=print_cells,
)
