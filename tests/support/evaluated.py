"""A checkpoint evaluated from Python, with a task given as an object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distcore import RankInfo, RunConfig, Task
from distcore.jobs.evaluate import evaluate_as_rank
from distcore.jobs.train import resolve_here
from distcore.rank_environment import join


def evaluate_checkpoint(config: RunConfig, path: Path, task: Task | None = None) -> dict[str, Any]:
    """Evaluate the weights of the checkpoint ``path`` on the test rows of ``config``; every rank
    gets the same report.

    Call it in every rank that a launcher started, or in a single process. ``task`` overrides the
    config's. Raises DistcoreError, one line.
    """
    return evaluate_as_rank(
        resolve_here(config, training=False, task=task), join(os.environ) or RankInfo(), path
    )
