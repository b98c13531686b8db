"""Small runs of a session, which the labs of optimizers and of schedules train and compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from distcore import Session
from distcore.checkpoint import Checkpoint, find


def step_until(session: Session, loss: Callable[..., Tensor], last: int) -> None:
    """Make steps by the gradients of ``loss`` until the run has made ``last``."""
    for step in session:
        step.gradients(loss)
        step.apply()
        if session.progress.step == last:
            break


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the last checkpoint of a run, by neutral name."""
    path = find("auto", folder)
    assert path is not None  # the run has ended
    checkpoint = Checkpoint(path)
    return {name: checkpoint[name] for name in checkpoint}
