"""What is asked of rows that may be read and encoded when their step comes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from distcore import Column
from distcore_tasks.shared.streams.values import spread


def mean_lengths(lengths: Column, bounds: Sequence[int]) -> list[float]:
    """Return the mean length of some rows of each source of a mixture, of which
    ``bounds`` are the bounds.
    """
    return [
        float(lengths[spread(first, end)].mean()) if end > first else 1.0
        for first, end in pairwise(bounds)
    ]


def streamed_rows(rows: Any) -> Any:
    """Return what reads the rows of a dataset when their step comes; ``None`` if they are stored.

    It has the members ``name``, ``pieces``, ``fetched_ahead``, ``have_room`` and ``check_room`` of
    ``StreamedTable``.
    """
    return getattr(rows, "streamed", None)
