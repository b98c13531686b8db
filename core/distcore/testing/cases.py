"""All cases, in the order of the laws: importing the module of a law registers its cases."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from distcore.testing.findings import LAWS, Case
from distcore.testing.register import JOB_CASES, RANK_CASES, TASK_CASES

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
    return _in_order(TASK_CASES)


def _in_order(cases: Mapping[str, Case]) -> Mapping[str, Case]:
    return dict(sorted(cases.items(), key=lambda item: LAWS[item[1].law]))
