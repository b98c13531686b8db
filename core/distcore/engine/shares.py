"""The items of a step's rows: the factors that make sums over rows shares of global means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distcore.plugin.batching.columns import Column, common_value, read
from distcore.plugin.batching.sampling import BatchPlan
from distcore.plugin.strategy.contract import Run
from distcore.plugin.task.datasets import counts_of
from distcore.plugin.task.task import Dataset

Term = tuple[float, Column]
"""An additional term of the loss: its scale, and each row's weight in the mean of the term."""
NO_TERMS: Mapping[str, Term] = {}


@dataclass(frozen=True, slots=True)
class Shares:
    """How sums of one step become shares of global means, times ``run.loss_multiplier``."""

    items: int
    """Items of the loss in the global batch."""
    scale: float
    """Factor of the loss; 0 for a step without items, which has no gradient."""
    terms: Mapping[str, Term]
    """The additional terms of the loss by name."""


class ItemCounts:
    """The items of the rows of one epoch: of the loss, and of each additional term."""

    def __init__(self, dataset: Dataset, terms: Sequence[str]) -> None:
        """``terms``: names of what the task logs, additional terms of the loss among them."""
        self._items = dataset.items
        self._items_per_row = common_value(dataset.items)  # then no step reads the column
        counted = counts_of(dataset)
        self._counts = {name: counted.get(name, dataset.items) for name in terms}
        self._last: tuple[int, Shares] | None = None

    def shares(self, run: Run, plan: BatchPlan, epoch: int, number: int, rows: int) -> Shares:
        """Return the shares of step ``number`` of an epoch, whose global batch has ``rows`` rows.

        Every rank counts the whole global batch.
        """
        follow_from_size = self._items_per_row is not None and not self._counts
        if follow_from_size and self._last is not None and self._last[0] == rows:
            return self._last[1]
        if self._items_per_row:
            items = rows * self._items_per_row
        else:
            items = int(read(self._items, plan.rows(epoch, number)).sum())
        scale = run.loss_multiplier / items if items else 0.0
        terms = NO_TERMS
        if self._counts:
            terms = terms_of(run, self._counts, plan.rows(epoch, number))
        shares = Shares(items, scale, terms)
        self._last = (rows, shares)
        return shares


def terms_of(run: Run, counts: Mapping[str, Column], rows: np.ndarray) -> dict[str, Term]:
    """Return each additional term of the loss by name; ``rows`` are those of the global batch."""
    terms: dict[str, Term] = {}
    for name, count in counts.items():
        total = int(read(count, rows).sum())
        scale = run.loss_multiplier / total if total else 0.0
        terms[name] = (scale, count)
    return terms
