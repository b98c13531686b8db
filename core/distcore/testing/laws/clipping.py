"""Law 3: clipping acts on the whole gradient as one process would; one scheduler step an optimizer step."""

from __future__ import annotations

from distcore.testing.cases import FP32, Measured, Skip, law
from distcore.testing.lab import Lab
from distcore.testing.laws.gradient import compared
from distcore.testing.problem import Problem
from distcore.testing.reference import solve


@law("clipping")
def clip_by_norm(lab: Lab) -> Measured:
    """A norm that every gradient exceeds; the norm reported is that of the whole gradient before clipping."""
    return compared(lab, Problem(), clip={"norm": 0.05})


@law("clipping")
def clip_by_value(lab: Lab) -> Measured:
    """Each element to at most 1e-3, after the norm was taken."""
    return compared(lab, Problem(), clip={"norm": 1e9, "value": 1e-3})


@law("clipping")
def clip_by_both(lab: Lab) -> Measured:
    """First the norm, then the value."""
    return compared(lab, Problem(), clip={"norm": 0.05, "value": 5e-3})


@law("clipping")
def clip_after_accumulation(lab: Lab) -> Measured:
    """Several micro-batches a step are clipped once, when they are all there."""
    return compared(lab, Problem(rows=4 * lab.global_batch + 1), clip={"norm": 0.05}, micro_batch_size=1)


@law("clipping")
def schedule(lab: Lab) -> Measured:
    """Warm-up and linear decay move once an optimizer step, not once a rank or micro-batch."""
    return compared(lab, Problem(), schedule={"name": "linear", "warmup_steps": 3}, micro_batch_size=1)


@law("clipping")
def learning_rates(lab: Lab) -> Measured:
    """The rate that the optimizer shows after each step is the schedule's."""
    job = lab.job(Problem(), schedule={"name": "linear", "warmup_steps": 3})
    if job.run.scheduler is None:
        raise Skip("the strategy owns the schedule")
    found = job.train(9).rates
    solution = solve(job.task, job.run.config, 10)
    error = max(abs(a - b) for a, b in zip(found, solution.rates[1:], strict=True))
    return Measured(error=error, bound=FP32 * 0.01, note=f"last rate {found[-1]:.3g} for {solution.rates[-1]:.3g}")
