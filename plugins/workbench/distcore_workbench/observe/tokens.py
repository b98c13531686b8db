"""The work of the steps between two log lines: rows, real tokens, and operations of the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distcore import BatchPlan, Progress
from distcore.plugin.batching import read
from distcore_workbench.observe.row_flops import RowFlops

TOGETHER = 64
"""Steps whose lengths are read at once."""


class Work:
    """Knows which rows each step has, which follows from the plan: a step costs nothing
    until its log line.
    """

    def __init__(self, progress: Progress) -> None:
        """Begin at ``progress``."""
        self.plan: BatchPlan | None = None
        """The plan of the training; the loop's own, which keeps the order of an epoch."""
        self.flops: RowFlops | None = None
        """Operations of a row, once they are known."""
        self._at = progress

    def figures(
        self, progress: Progress, samples_per_second: float, peak: float | None
    ) -> dict[str, float]:
        """Return the figures of the log line at ``progress``; ``peak``: FLOP/s of all devices,
        if it is known.

        Rows that all have one token, such as images, have no tokens.
        """
        steps, seconds = (
            progress.step - self._at.step,
            (progress.samples - self._at.samples) / samples_per_second,
        )
        rows, tokens, operations = 0, 0, 0.0
        for lengths in self._lengths_until(progress):
            rows, tokens = rows + len(lengths), tokens + int(lengths.sum())
            operations += self.flops.total(lengths) if self.flops else 0.0
        self._at, figures = progress, dict[str, float]()
        if tokens != rows:
            figures["tokens_per_second"] = tokens / seconds
        if operations:
            figures["model_flops"] = operations / steps
            if peak is not None:
                figures["mfu"] = operations / seconds / peak
        return figures

    def _lengths_until(self, progress: Progress) -> Iterator[np.ndarray]:
        """Yield the lengths of all rows from the last log line to ``progress``."""
        assert self.plan is not None  # the loop has built its sampler
        epoch, step = self._at.epoch, self._at.step_in_epoch
        batches: list[np.ndarray] = []
        for left in reversed(range(progress.step - self._at.step)):
            batches.append(self.plan.rows(epoch, step))
            step += 1
            if step == self.plan.steps:
                epoch, step = epoch + 1, 0
            if len(batches) == TOGETHER or not left:
                yield read(self.plan.lengths, np.concatenate(batches))
                batches = []
