"""Hints at other tasks, for rows that are theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from distcore import DataError

OTHERS = (
    ("preference", {"prompt", "chosen", "rejected"}),
    ("causal-lm", {"prompt", "completion"}),
    ("causal-lm", {"messages"}),
    ("seq2seq", {"source", "target"}),
    ("token-classification", {"tokens", "tags"}),
    ("embedding", {"anchor", "positive"}),
)
"""Other tasks, and columns that are theirs."""


@contextmanager
def naming_other_tasks() -> Iterator[None]:
    """Add to the error of a missing column the task whose columns there are."""
    try:
        yield
    except DataError as error:
        listed = re.search(r"\(found: (.*?)\)", str(error))
        there = set(listed[1].split(", ")) if listed else set()
        task = next((task for task, columns in OTHERS if columns <= there), None)
        raise DataError(f"{error}, or train with --task {task}") if task else error from None
