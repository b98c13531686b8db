"""How far a run is after one more optimizer step."""

from __future__ import annotations

from distcore.plugin.batching.sampling import BatchPlan
from distcore.plugin.strategy.contract import Progress


def advance(progress: Progress, plan: BatchPlan, rows: int, is_skipped: bool = False) -> Progress:
    """Return the progress after one more optimizer step, on ``rows`` rows."""
    epoch_ended = progress.step_in_epoch + 1 == plan.steps
    return Progress(
        step=progress.step + 1,
        epoch=progress.epoch + epoch_ended,
        step_in_epoch=0 if epoch_ended else progress.step_in_epoch + 1,
        samples=progress.samples + rows,
        skipped=progress.skipped + is_skipped,
    )
