"""The work of the steps between two log lines: rows, real tokens, and operations of the model."""

from __future__ import annotations

from distcore import BatchPlan, Progress
from distcore.jobs import read
from distcore_workbench.observe.flops import RowFlops


class Work:
    """Adds up the global batches. Every rank can: which rows they have follows from the plan."""

    def __init__(self, progress: Progress, flops: RowFlops | None) -> None:
        """Begin at ``progress``; ``flops``: operations of a row, if they are known."""
        self.plan: BatchPlan | None = None
        """The plan of the training; the loop's own, which keeps the order of an epoch."""
        self._at, self._flops = progress, flops
        self._clear()

    def add(self, progress: Progress) -> None:
        """Add the step that led to ``progress``."""
        assert self.plan is not None  # the loop has built its sampler
        lengths = read(self.plan.lengths, self.plan.rows(self._at.epoch, self._at.step_in_epoch))
        self._rows += len(lengths)
        self._tokens += int(lengths.sum())
        self._steps += 1
        self._operations += self._flops.of(lengths) if self._flops else 0.0
        self._at = progress

    def figures(self, samples_per_second: float, peak: float | None) -> dict[str, float]:
        """Return the figures of a log line, and begin the next; ``peak``: FLOP/s of all devices, if it is known.

        Rows that all have one token, such as images, have no tokens.
        """
        figures, seconds = dict[str, float](), self._rows / samples_per_second
        if self._tokens != self._rows:
            figures["tokens_per_second"] = self._tokens / seconds
        if self._operations:
            figures["model_flops"] = self._operations / self._steps
            if peak is not None:
                figures["mfu"] = self._operations / seconds / peak
        self._clear()
        return figures

    def _clear(self) -> None:
        self._rows = self._tokens = self._steps = 0
        self._operations = 0.0
