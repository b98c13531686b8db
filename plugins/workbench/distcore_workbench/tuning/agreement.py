"""Compare a trial with the reference by its losses and gradient norms,
which show other mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass

from distcore import RunConfig
from distcore_workbench.tuning.outcome import Outcome

TINY = 1e-12
"""Smallest divisor of a relative difference."""
COMPARED = 5
"""Steps that are compared: rounding grows from step to step, and a bug is there at once."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative differences that rounding explains."""

    loss: float
    """Of the mean loss of a step."""
    norm: float
    """Tolerance of the gradient norm, which shows a gradient that is too large by a
    factor; AdamW hides it.
    """


TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-4),
    "bf16": Tolerance(2e-2, 1e-1),
    "fp16": Tolerance(2e-2, 1e-1),
}
"""By precision."""
MASKED = Tolerance(0.2, 1.0)
"""Where dropout cannot be switched off: masks depend on how a step is cut, so only
gross differences are seen.
"""


def difference(trial: Outcome, reference: Outcome, tolerance: Tolerance) -> str:
    """Return in one line how a trial differs from the reference; empty if it agrees."""
    for name, mine, theirs, bound in (
        ("gradient norm", trial.norms, reference.norms, tolerance.norm),
        ("loss", trial.losses, reference.losses, tolerance.loss),
    ):
        for step, (one, other) in enumerate(
            zip(mine[:COMPARED], theirs[:COMPARED], strict=False), 1
        ):
            off = abs(one - other) / max(abs(other), TINY)
            if not off <= bound:  # so that NaN does not pass
                return (
                    f"{name} of step {step} is {one:.6g}, the reference's {other:.6g}: "
                    f"{off:.1e} apart, {bound:.0e} is allowed"
                )
    return ""


def tolerance_of(config: RunConfig, masked: bool) -> Tolerance:
    """Return the tolerance for a resolved config; ``masked``: its dropout could
    not be switched off.
    """
    return MASKED if masked else TOLERANCES[config.precision]
