"""Learning-rate schedules: the factor of the peak rate at each optimizer step.

Each is the schedule of the same name in ``transformers.get_scheduler``, to the last bit, so that
configs and checkpoints mean the same in both libraries. A factor is a function of ``(step, warmup,
total, ...)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

WARMUP_STABLE_DECAY = "warmup_stable_decay"
"""The schedule that holds its peak until the last part of the run."""
POLYNOMIAL_END = 1e-7
"""Learning rate at which the polynomial schedule ends."""
INVERSE_SQRT_STEPS = 10_000
"""Time scale of ``inverse_sqrt`` without a warm-up, in steps."""


def lambda_scheduler(
    name: str,
    optimizer: Optimizer,
    warmup: int,
    total: int,
    decay: int,
    interval: int = 1,
    *,
    peak: float,
) -> LambdaLR:
    """Return a schedule, to be stepped once per optimizer step.

    Its rate changes every ``interval`` steps.

    ``warmup``, ``total`` and ``decay`` are numbers of optimizer steps; ``decay`` is used by
    ``warmup_stable_decay`` alone. ``peak`` is the run's rate; groups with rates of their own follow
    the same factor. Raises KeyError for a name that is not in ``SCHEDULES``.
    """
    factor = SCHEDULES[name]
    if name == "polynomial":
        # Not optimizer.defaults["lr"], as transformers has it: each group has a rate, so the
        # default may be missing, or be the optimizer's own, which no group has.
        factor = partial(factor, peak=peak)
    elif name == WARMUP_STABLE_DECAY:
        factor = partial(factor, decay=decay)
    # A partial, not a function: LambdaLR saves a state for it, and checkpoints have always had
    # that (empty) state.
    warmed_up = partial(_warmed_up, factor=factor, warmup=warmup, total=total, interval=interval)
    return LambdaLR(optimizer, warmed_up)


def _warmed_up(
    step: int, *, factor: Callable[..., float], warmup: int, total: int, interval: int
) -> float:
    """Return the factor of a schedule with a linear warm-up, constant within each interval."""
    step -= step % interval
    if step < warmup:
        return step / max(1, warmup)
    return factor(step, warmup, total)


def _progress(step: int, warmup: int, total: int) -> float:
    return (step - warmup) / max(1, total - warmup)


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, warmup: int, total: int) -> float:
    angle = math.pi * _progress(step, warmup, total)
    return max(0.0, 0.5 * (1.0 + math.cos(angle)))


def _cosine_with_restarts(step: int, warmup: int, total: int) -> float:
    """Follow a single cosine, which ends at 0, as ``transformers`` does without arguments."""
    progress = _progress(step, warmup, total)
    if progress >= 1.0:
        return 0.0
    angle = math.pi * (progress % 1.0)
    return max(0.0, 0.5 * (1.0 + math.cos(angle)))


def _polynomial(step: int, warmup: int, total: int, peak: float) -> float:
    if step > total:
        return POLYNOMIAL_END / peak
    left = 1 - (step - warmup) / max(1, total - warmup)
    return ((peak - POLYNOMIAL_END) * left + POLYNOMIAL_END) / peak


def _inverse_sqrt(step: int, warmup: int, total: int) -> float:
    scale = warmup or INVERSE_SQRT_STEPS
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


def _warmup_stable_decay(step: int, warmup: int, total: int, decay: int) -> float:
    """Hold the peak until ``decay`` steps before the end, then follow a cosine to 0."""
    start_of_decay = total - decay
    if step < start_of_decay:
        return 1.0
    if step >= total:
        return 0.0
    progress = (step - start_of_decay) / max(1, decay)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "inverse_sqrt": _inverse_sqrt,
    "linear": _linear,
    "polynomial": _polynomial,
    WARMUP_STABLE_DECAY: _warmup_stable_decay,
}
"""Factor after the warm-up, by the name that ``schedule.name`` takes."""
