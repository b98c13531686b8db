"""Learning-rate schedules: the factor of the peak rate at each optimizer step.

Each of the core's own is the schedule of the same name in ``transformers.get_scheduler``, to the
last bit, so that configs and checkpoints mean the same in both libraries. Others are entry points
of ``distcore.schedules``, or functions of a file. Imports no torch: names are checked before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from distcore import registry
from distcore.errors import ConfigError
from distcore.hints import nearest

WARMUP_STABLE_DECAY = "warmup_stable_decay"
"""The schedule that holds its peak until the last part of the run."""
POLYNOMIAL_END = 1e-7
"""Learning rate at which the polynomial schedule ends."""
INVERSE_SQRT_STEPS = 10_000
"""Time scale of ``inverse_sqrt`` without a warm-up, in steps."""
SUPPLIED = (
    "step",
    "warmup_steps",
    "total_steps",
    "steps_per_epoch",
    "peak_lr",
    "decay_ratio",
)
"""What a schedule can ask for by the name of a parameter; its other parameters are options.

``step`` counts optimizer steps from 0, those of the warm-up included, to ``total_steps``.
"""


def schedule_names() -> list[str]:
    """Return the names of all schedules that have one, sorted. Imports no plugin."""
    return sorted({*SCHEDULES, *registry.offers("schedules")})


def check_schedule_name(name: str) -> None:
    """Raise ConfigError, one line, unless the schedule is the core's own, installed, or a
    function of a file that is there. Imports no plugin.
    """
    installed = registry.offers("schedules")
    if name in SCHEDULES:
        if name in installed:
            owner = registry.distribution(installed[name][0])
            raise ConfigError(
                f"schedule.name = {name!r}: is the core's own, and {owner} has one of that name,"
                " too; rename that one"
            )
        return
    if ".py:" not in name and name not in installed:
        names = schedule_names()
        raise ConfigError(
            f"schedule.name = {name!r}: no such schedule{nearest(name, names)} (known:"
            f" {', '.join(names)}; or a function of yours, file.py:NAME)"
        )
    registry.check_name("schedules", name)


def load_schedule(name: str) -> Callable[..., float]:
    """Import and return a schedule's function; raises ConfigError, one line, if there is none."""
    check_schedule_name(name)
    if name in SCHEDULES:
        return SCHEDULES[name]
    loaded: Callable[..., float] = registry.load("schedules", name)
    return loaded


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    return (step - warmup_steps) / max(1, total_steps - warmup_steps)


def _constant(step: int, warmup_steps: int, total_steps: int) -> float:
    return 1.0


def _linear(step: int, warmup_steps: int, total_steps: int) -> float:
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def _cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    angle = math.pi * _progress(step, warmup_steps, total_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(angle)))


def _cosine_with_restarts(step: int, warmup_steps: int, total_steps: int) -> float:
    """Follow a single cosine, which ends at 0, as ``transformers`` does without arguments."""
    progress = _progress(step, warmup_steps, total_steps)
    if progress >= 1.0:
        return 0.0
    angle = math.pi * (progress % 1.0)
    return max(0.0, 0.5 * (1.0 + math.cos(angle)))


def _polynomial(step: int, warmup_steps: int, total_steps: int, peak_lr: float) -> float:
    if step > total_steps:
        return POLYNOMIAL_END / peak_lr
    left = 1 - (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return ((peak_lr - POLYNOMIAL_END) * left + POLYNOMIAL_END) / peak_lr


def _inverse_sqrt(step: int, warmup_steps: int, total_steps: int) -> float:
    scale = warmup_steps or INVERSE_SQRT_STEPS
    return 1.0 / math.sqrt((step + scale - warmup_steps) / scale)


def _warmup_stable_decay(
    step: int, warmup_steps: int, total_steps: int, decay_ratio: float
) -> float:
    """Hold the peak until the last part of the steps, then follow a cosine to 0."""
    decay_steps = min(round(decay_ratio * total_steps), total_steps - warmup_steps)
    start_of_decay = total_steps - decay_steps
    if step < start_of_decay:
        return 1.0
    if step >= total_steps:
        return 0.0
    progress = (step - start_of_decay) / max(1, decay_steps)
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
"""The core's own: the factor after the warm-up, by the name that ``schedule.name`` takes."""
