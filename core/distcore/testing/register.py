"""The register of the functions that measure a law, and its decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distcore.testing.findings import Case, Measured

if TYPE_CHECKING:
    from distcore.testing.lab import JobLab, Lab
    from distcore.testing.task_lab import TaskLab


from collections.abc import Mapping
from importlib import import_module

from distcore.testing.findings import LAWS

RANK_CASES: dict[str, Case] = {}
"""Cases that run inside the ranks, by name; complete once ``all_cases`` was called."""
JOB_CASES: dict[str, Case] = {}
"""Cases that start processes of their own, by name; complete once ``all_cases`` was called."""
TASK_CASES: dict[str, Case] = {}
"""Cases of a task, which run in one process, by name; complete once ``task_cases`` was called."""


def law(name: str) -> Callable[[Callable[[Lab], Measured]], Callable[[Lab], Measured]]:
    """Return a decorator that registers a function of a ``Lab`` as a case of the law ``name``.

    The case gets the function's name, with ``-`` for ``_``; its title is the first line of the docstring.
    """
    return lambda function: _register(RANK_CASES, name, function)


def job_law(name: str) -> Callable[[Callable[[JobLab], Measured]], Callable[[JobLab], Measured]]:
    """Return a decorator like ``law``'s, for a function of a ``JobLab``, which starts its own processes."""
    return lambda function: _register(JOB_CASES, name, function)


def task_law(name: str) -> Callable[[Callable[[TaskLab], Measured]], Callable[[TaskLab], Measured]]:
    """Return a decorator like ``law``'s, for a function of a ``TaskLab``, which measures a task."""
    return lambda function: _register(TASK_CASES, name, function)


def _register(cases: dict[str, Case], name: str, function: Callable[..., Measured]) -> Callable[..., Measured]:
    case = function.__name__.replace("_", "-")
    cases[case] = Case(name, case, (function.__doc__ or "").strip().partition("\n")[0], function)
    return function


MODULES = ("order", "gradient", "clipping", "evaluation", "checkpoint", "resume", "agreement", "surprise")
"""The modules of ``distcore.testing.laws``; importing one registers its cases."""


def all_cases() -> Mapping[str, Case]:
    """Return every case by name, in the order of the laws."""
    for module in MODULES:
        import_module(f"distcore.testing.laws.{module}")
    return _in_order(RANK_CASES | JOB_CASES)


def task_cases() -> Mapping[str, Case]:
    """Return every case of a task by name, in the order of the laws."""
    import_module("distcore.testing.task_laws")
    import_module("distcore.testing.step_laws")
    return _in_order(TASK_CASES)


def _in_order(cases: Mapping[str, Case]) -> Mapping[str, Case]:
    return dict(sorted(cases.items(), key=lambda item: LAWS[item[1].law]))
