"""The register of the functions that measure a law, and its decorators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from distcore.testing.findings import LAWS, Case, Measured

RANK_CASES: dict[str, Case] = {}
"""Cases that run inside the ranks, by name; complete once ``all_cases`` was called."""
JOB_CASES: dict[str, Case] = {}
"""Cases that start processes of their own, by name; complete once ``all_cases`` was called."""
TASK_CASES: dict[str, Case] = {}
"""Cases of a task, which run in one process, by name; complete once ``task_cases`` was called."""
Law = Callable[[str], Callable[[Callable[[Any], Measured]], Callable[[Any], Measured]]]


def _title(function: Callable[..., object]) -> str:
    """Return the first paragraph of its docstring as one line."""
    paragraph = (function.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(paragraph.split())


def _registers(cases: dict[str, Case]) -> Law:
    def law(name: str) -> Callable[[Callable[[Any], Measured]], Callable[[Any], Measured]]:
        def register(function: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
            case = function.__name__.replace("_", "-")
            cases[case] = Case(name, case, _title(function), function)
            return function

        return register

    return law


law, job_law, task_law = map(_registers, (RANK_CASES, JOB_CASES, TASK_CASES))
"""Decorators by the name of a law: they register a function of a ``Lab``, ``JobLab`` or
``TaskLab`` as a case.

The case gets the function's name, with ``-`` for ``_``; its title is the first
line of the docstring.
"""
MODULES = (
    "order",
    "gradient",
    "clipping",
    "evaluation",
    "checkpoint",
    "resume",
    "agreement",
    "surprise",
    "memory",
)
"""The modules of ``distcore.testing.laws``; importing one registers its cases."""
OWN_MODULES = "distcore.testing.laws.own_modules"
"""The module with the cases of modules of a user's own."""


def all_cases() -> Mapping[str, Case]:
    """Return every case of the laws' own models by name, in the order of the laws."""
    for module in MODULES:
        import_module(f"distcore.testing.laws.{module}")
    cases = RANK_CASES | JOB_CASES
    return _in_order(
        {name: case for name, case in cases.items() if case.measure.__module__ != OWN_MODULES}
    )


def own_module_cases() -> Mapping[str, Case]:
    """Return the cases of modules of a user's own by name: a run trains these, or is
    refused in one line.
    """
    import_module(OWN_MODULES)
    cases = RANK_CASES | JOB_CASES
    return {name: case for name, case in cases.items() if case.measure.__module__ == OWN_MODULES}


def strategy_cases() -> Mapping[str, Case]:
    """Return every case of a strategy by name: those of the laws' own models, then
    those of modules of a user's own.
    """
    return {**all_cases(), **own_module_cases()}


def task_cases() -> Mapping[str, Case]:
    """Return every case of a task by name, in the order of the laws."""
    import_module("distcore.testing.task_laws")
    import_module("distcore.testing.step_laws")
    return _in_order(TASK_CASES)


def _in_order(cases: Mapping[str, Case]) -> Mapping[str, Case]:
    return dict(sorted(cases.items(), key=lambda item: LAWS[item[1].law]))
