"""A strategy keeps what it must remember in the slot that the core hands on, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    file
    for place in ("core/distcore", "plugins", "examples")
    for file in sorted((ROOT / place).rglob("*.py"))
    if "tests" not in file.parts
]
SMUGGLED = re.compile(
    # kept on a module under a name that nobody knows
    r"""vars\([^)]*\)(\.(get|pop))?[\[(]["']distcore_"""
    r"""|cast\([^()]*,\s*run\.\w+\)"""  # reached through what the run has for all
)


def test_state_of_a_strategy_is_neither_smuggled_on_a_module_nor_cast() -> None:
    for file in SOURCES:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert not SMUGGLED.search(line), f"{file}:{number}: {line.strip()}"


@pytest.mark.parametrize(
    "line",
    [
        'vars(model)["distcore_layout"] = layout',
        "sequences = vars(run.module).get('distcore_sequences')",
        'return vars(model).pop("distcore_weights", None)',
        "root = cast(FSDPModule, run.model)",
        "text = cast(Any, run.model).config",
    ],
)
def test_the_ways_to_smuggle_are_seen(line: str) -> None:
    assert SMUGGLED.search(line)


@pytest.mark.parametrize(
    "line", ["state: Layout = run.strategy_state", "vars(namespace).update(values)"]
)
def test_lines_that_smuggle_nothing_are_not_seen(line: str) -> None:
    assert not SMUGGLED.search(line)
