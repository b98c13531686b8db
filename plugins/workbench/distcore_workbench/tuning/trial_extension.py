"""The extension of a trial: it times and records the first steps, has the heaviest batch last, and
ends the run there.

It is named in a trial's config by this file's path, so that it is none of the extensions
that a user sees.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcore import BatchPlan, DistcoreError, MicroBatch, Progress, Run, Sampler, hookimpl
from distcore.distributed import peak_memory
from distcore.files import strict_json, write_atomically
from distcore.plugin.batching import is_windowed, whole
from distcore_workbench.profiling.stopwatch import Stopwatch, seconds_between

HEAVIEST = 2
"""Steps at the end of a trial, neither timed nor compared: those with most tokens and
with the longest row.
"""
SEARCHED = 100_000
"""Most steps of an epoch among which these are looked for."""
WAIT = 10.0
"""Seconds for which a rank waits until the others have written their findings."""


class TrialOver(DistcoreError):
    """The trial has seen enough: its run ends here, without evaluation and checkpoint."""


@dataclass
class Trial(Stopwatch):
    """Record losses, norms and times of a trial in ``trial-RANK.json`` in the run folder.

    ``max_steps`` is ``HEAVIEST`` more than ``steps``.
    """

    steps: int = 10
    """Steps that are timed and recorded."""
    ends: bool = True
    """End the run after its last step, without evaluation and checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._measured: dict[str, list[float]] = {"losses": [], "norms": []}

    @hookimpl(wrapper=True)
    def build_sampler(self, run: Run, plan: BatchPlan) -> Generator[None, Sampler, Sampler]:
        """Put the heaviest steps of the first epoch in the place of the last steps of the run."""
        sampler = yield
        if plan.order in ("longest-first", "sequential"):  # an evaluation
            return sampler
        heavy = heaviest(plan)

        def with_heaviest(epoch: int, step: int) -> Sequence[MicroBatch]:
            left = run.total_steps - epoch * plan.steps - step
            if 1 <= left <= len(heavy):
                return sampler(0, heavy[left - 1])
            return sampler(epoch, step)

        return with_heaviest

    @hookimpl(trylast=True)
    def on_step_end(self, progress: Progress) -> None:
        """Note the end of a step that counts."""
        if progress.step <= self.steps:
            super().on_step_end(progress)

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Note loss and norm of a step; after the last step, end the run."""
        if record["step"] <= self.steps:
            self._measured["losses"].append(record["loss"])
            if "grad_norm" in record:
                self._measured["norms"].append(record["grad_norm"])
        if self.ends and record["step"] == run.total_steps:
            self._write(run)
            _wait_for_all(run)
            raise TrialOver("the trial is over")

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        """Write the file of a run that goes to its end."""
        self._write(run)

    def _write(self, run: Run) -> None:
        facts = {
            "began": self._began,
            "seconds": [seconds_between(*span) for span in self._spans],
            "samples": self._samples,
            "peak": peak_memory(run.world.device),
            **self._measured,
        }
        write_atomically(file_of(run, run.world.rank), strict_json(facts))


def heaviest(plan: BatchPlan) -> list[int]:
    """Return the steps of the first epoch with most tokens and with the longest row; ``HEAVIEST``
    of them, or none.

    None where the lengths cannot be read as a whole.
    """
    if is_windowed(plan.lengths):
        return []
    lengths = whole(plan.lengths)
    steps = range(min(plan.steps, SEARCHED))
    rows = [lengths[plan.rows(0, step)] for step in steps]
    return [
        int(np.argmax([one.sum() for one in rows])),
        int(np.argmax([one.max() for one in rows])),
    ]


def file_of(run: Run, rank: int) -> Path:
    """Return the file of a rank."""
    return Path(str(run.config.out), f"trial-{rank}.json")


def _wait_for_all(run: Run) -> None:
    """Wait for the files of all ranks: the first that ends has the others ended, too."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline and not all(
        file_of(run, rank).exists() for rank in range(run.world.size)
    ):
        time.sleep(0.01)
