"""Law 9: a strategy runs only the collectives that it declares, and imports no other strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distcore.distributed import dtensors
from distcore.engine.loader import to_device
from distcore.launchers.processes.log_files import close_stderr
from distcore.plugin.strategy.contract import Progress
from distcore.testing.findings import EXACT, Measured, Skip
from distcore.testing.lab import Job, JobLab, Lab
from distcore.testing.laws.gradient import needs_calls
from distcore.testing.problem import Problem
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.variants import Referenced

WARM_UP, STEPS = 3, 4
"""Numbers of warm-up steps, in which a backend may still set up, and of counted optimizer steps."""


@STRATEGIES.law("surprise")
def collectives_per_step(lab: Lab) -> Measured:
    """A step with two micro-batches runs as many collectives, counted by torch's
    profiler, as are declared.
    """
    declared = lab.hooks.capabilities.collectives_per_step
    if declared is None:
        raise Skip("the strategy declares that the number depends on the model")
    rows_of_all_steps = 10 * lab.global_batch
    job = lab.job(Problem(rows=rows_of_all_steps), clip={"norm": None})
    counts = _collectives(job)
    per_step = counts.total() / STEPS
    # A single rank need not communicate, whatever is declared for several.
    is_silent_alone = per_step == 0 and lab.world.size == 1
    error = 0.0 if is_silent_alone else abs(per_step - declared)
    kinds = [f"{count / STEPS:g} {name}" for name, count in sorted(counts.items())]
    note = f"per step: {', '.join(kinds) or 'none'}; declared: {declared}"
    return Measured(error=error, bound=EXACT, note=note)


@STRATEGIES.law("surprise")
def repeated_blocks_sent_once(lab: Lab) -> Measured:
    """Gradients of blocks that a forward pass calls twice are sent as often as those of blocks
    that it calls once.
    """
    if lab.world.shards < lab.world.size:
        raise Skip("ranks also share layers or sequences, and communicate in each call of a block")
    rows = 10 * lab.global_batch
    once = _sums(lab.job(Problem(rows=rows, repeated=False)))
    twice = _sums(lab.job(Problem(rows=rows, repeated=True)))
    note = (
        f"sums over ranks in {STEPS} steps: {twice} of blocks that are called twice, {once} of"
        " others"
    )
    return Measured(error=max(0, twice - once), bound=EXACT, note=note)


@STRATEGIES.law("surprise")
def frozen_same_after(lab: Lab) -> Measured:
    """After training, a frozen model answers as before, bit for bit; a rank holds no more of it
    than of the other.
    """
    needs_calls(lab)
    frozen_models: list[nn.Module] = []

    class Notes(Referenced):
        def consult(self, frozen: Mapping[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
            frozen_models[:] = frozen.values()
            return super().consult(frozen, batch)

    job = lab.job(Notes())
    first_rows = job.data.train.batch(np.arange(4))
    batch = to_device(first_rows, lab.world.device)
    consult = job.run.consult
    assert consult is not None  # the problem has a frozen model
    before = consult(batch)["began"].clone()
    job.train(3)
    moved = float((consult(batch)["began"] - before).abs().max())
    [frozen_model] = frozen_models
    frozen_elements = _elements_held(frozen_model)
    trained_elements = _elements_held(job.run.module)
    note = (
        f"a logit differs by {moved:.1e}; {frozen_elements} elements of it here,"
        f" {trained_elements} of the trained model"
    )
    excess = max(0, frozen_elements - trained_elements)
    return Measured(error=moved + excess, bound=EXACT, note=note)


@STRATEGIES.job_law("surprise")
def imports_no_other_strategy(lab: JobLab) -> Measured:
    """A training step in a new process imports no other strategy, and no package that
    only other strategies require.
    """
    modules = lab.foreign_modules()
    if isinstance(modules, str):
        return Measured(error=float("inf"), bound=EXACT, note=modules)
    return Measured(
        error=len(modules), bound=EXACT, note=f"foreign modules: {', '.join(modules) or 'none'}"
    )


def _elements_held(model: nn.Module) -> int:
    """Return how many elements of the parameters this rank holds between two passes."""
    dtensors.reshard(model)
    held = 0
    for parameter in model.parameters():
        local_values, *_ = dtensors.local_part(parameter)
        held += local_values.numel()
    return held


def _sums(job: Job) -> int:
    """Return how many collectives of ``STEPS`` steps sum over ranks, whether each rank gets the
    whole sum or a part.
    """
    return sum(count for name, count in _collectives(job).items() if "reduce" in name)


def _collectives(job: Job) -> Counter[str]:
    """Return how often ``STEPS`` steps run each collective, by name."""
    steps = job.steps(Progress())
    for _ in range(WARM_UP):
        next(steps)
    # torch's profiler warns on stderr about forked processes.
    with close_stderr(), torch.autograd.profiler.profile(use_kineto=False) as profile:
        for _ in range(STEPS):
            next(steps)
    results = profile.kineto_results
    assert results is not None  # the profile has ended
    counts: Counter[str] = Counter()
    # Not profile.function_events: torch would first build the tree of all events, which takes
    # longer than the steps.
    for event in results.events():
        if event.name().startswith("c10d::"):
            name = event.name().removeprefix("c10d::")
            counts[name.rstrip("_")] += 1
    return counts
