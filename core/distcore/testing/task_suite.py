"""The suite of tasks: their laws are measured in one process."""

from distcore.testing.suite import Suite
from distcore.testing.task_lab import task_lab

MODULES = ("distcore.testing.task_laws", "distcore.testing.step_laws")
"""The modules of the cases; importing one registers them."""

TASKS = Suite("task", task_lab, MODULES, skips_by_plugin=True)
"""The laws of tasks."""
