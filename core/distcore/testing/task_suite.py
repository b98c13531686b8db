"""The suite of tasks: their laws are measured in one process."""

from distcore.testing.suite import Suite
from distcore.testing.task_lab import task_lab

TASKS = Suite("task", task_lab, ("distcore.testing.task_laws", "distcore.testing.step_laws"))
"""The laws of tasks."""
