"""Law 3: the whole gradient is clipped as one process would clip it; one scheduler
step per optimizer step.
"""

from __future__ import annotations

from distcore.plugin.strategy.contract import Progress
from distcore.testing.findings import FP32, Measured, Skip, needs
from distcore.testing.lab import Lab
from distcore.testing.laws.gradient import compare, needs_calls
from distcore.testing.problem import Problem
from distcore.testing.reference import solve
from distcore.testing.strategy_suite import STRATEGIES
from distcore.testing.variants import Bulky

LINEAR = {"name": "linear", "warmup_steps": 3}
NORM = 1e-7
"""Relative error of a norm that was added in fp64 and rounded once, with room for a
library that rounds twice.
"""


@STRATEGIES.law("clipping")
def clip_by_norm(lab: Lab) -> Measured:
    """Clip by a norm that every gradient exceeds; the reported norm is that of the
    whole gradient before clipping.
    """
    return compare(lab, Problem(), clip={"norm": 0.05})


@STRATEGIES.law("clipping")
def clip_by_value(lab: Lab) -> Measured:
    """Clip each element to the range from -1e-3 to 1e-3, after the norm was computed."""
    return compare(lab, Problem(), clip={"norm": 1e9, "value": 1e-3})


@STRATEGIES.law("clipping")
def clip_by_both(lab: Lab) -> Measured:
    """Clip by norm first, then by value."""
    return compare(lab, Problem(), clip={"norm": 0.05, "value": 5e-3})


@STRATEGIES.law("clipping")
def clip_after_accumulation(lab: Lab) -> Measured:
    """With several micro-batches per step, clip once, after the gradients of
    all of them were added.
    """
    problem = Problem(rows=4 * lab.global_batch + 1)
    return compare(lab, problem, clip={"norm": 0.05}, micro_batch_size=1)


@STRATEGIES.law("clipping")
def norm_of_a_large_tensor(lab: Lab) -> Measured:
    """The reported norm of a gradient of 23 million elements is right to the last digit of fp32."""
    needs_calls(lab)
    problem = Bulky(rows=lab.global_batch)
    step = next(lab.job(problem).steps(Progress()))
    if step.result.grad_norm is None:
        raise Skip("the strategy does not report the norm")
    norm = float(step.result.grad_norm)
    true_norm = problem.norm()
    error = abs(norm - true_norm) / true_norm
    return Measured(error=error, bound=NORM, note=f"norm {norm:.9g}, true {true_norm:.9g}")


@STRATEGIES.law("clipping")
def schedule(lab: Lab) -> Measured:
    """Warm-up and linear decay advance once per optimizer step, not once
    per rank or micro-batch.
    """
    return compare(lab, Problem(), schedule=LINEAR, micro_batch_size=1)


@STRATEGIES.law("clipping")
def learning_rates(lab: Lab) -> Measured:
    """After each step the optimizer has the learning rate of the schedule."""
    job = lab.job(Problem(), schedule=LINEAR)
    needs(job.run.scheduler is not None, "the strategy owns the schedule")
    rates = job.train(9).rates
    # A job reports the rate after a step, which is that of the next one; the solution its own.
    rates_due = solve(job.task, job.run.config, 10).rates[1:]
    errors = [abs(rate - due) for rate, due in zip(rates, rates_due, strict=True)]
    # The highest rate is 0.01, and the bound is relative to it.
    bound = FP32 * 0.01
    note = f"last rate {rates[-1]:.3g}, due {rates_due[-1]:.3g}"
    return Measured(error=max(errors), bound=bound, note=note)
