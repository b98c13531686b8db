"""Law 9: no collective that was not declared, and no other strategy imported."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distcore.plugin.contract import Progress
from distcore.testing.cases import EXACT, Measured, Skip, job_law, law
from distcore.testing.lab import Job, JobLab, Lab
from distcore.testing.problem import Problem

WARM_UP, STEPS = 3, 4
"""A backend may plan in its first steps; then these are counted."""


@law("surprise")
def collectives_per_step(lab: Lab) -> Measured:
    """Collectives of a step with two micro-batches, as torch's profiler sees them, against what is declared."""
    declared = lab.hooks.capabilities.collectives_per_step
    if declared is None:
        raise Skip("the strategy declares that the number depends on the model")
    job = lab.job(Problem(rows=10 * lab.global_batch), clip={"norm": None})
    found = _collectives(job)
    each = sum(found.values()) / STEPS
    kinds = ", ".join(f"{count / STEPS:g} {name}" for name, count in sorted(found.items())) or "none"
    return Measured(error=abs(each - declared), bound=EXACT, note=f"a step: {kinds}; declared {declared}")


@job_law("surprise")
def imports_no_other_strategy(lab: JobLab) -> Measured:
    """A step of training in a fresh process imports no other strategy, and nothing that only others require."""
    found = lab.foreign_modules()
    if isinstance(found, str):
        return Measured(error=float("inf"), bound=EXACT, note=found)
    return Measured(error=len(found), bound=EXACT, note=f"foreign modules: {', '.join(found) or 'none'}")


def _collectives(job: Job) -> Counter[str]:
    """Count by kind, over ``STEPS`` steps of the loop."""
    steps = job.steps(Progress())
    for _ in range(WARM_UP):
        next(steps)
    with _quiet_profiler(), torch.autograd.profiler.profile(use_kineto=False) as profile:
        for _ in range(STEPS):
            next(steps)
    names = (event.name for event in profile.function_events or [])
    return Counter(name.removeprefix("c10d::").rstrip("_") for name in names if name.startswith("c10d::"))


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep off the screen what the profiler says of having been forked in a thread: it counts all the same."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
