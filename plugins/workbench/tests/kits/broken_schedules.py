"""Schedules that are broken on purpose; a function's attribute names the case that must notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

Schedule = Callable[..., float]
calls: dict[str, float] = {}
"""What broken schedules keep between their steps."""


def breaks(case: str) -> Callable[[Schedule], Schedule]:
    """Return a decorator that says which case a schedule breaks."""

    def mark(schedule: Schedule) -> Schedule:
        vars(schedule)["case"] = case
        return schedule

    return mark


def sound(
    step: int,
    warmup_steps: int,
    total_steps: int,
    floor: Annotated[float, Field(ge=0, le=1)] = 0.25,
) -> float:
    """Fall along a line to a floor, and keep every law."""
    left = (total_steps - step) / max(1, total_steps - warmup_steps)
    return floor + (1 - floor) * left


@breaks("runs-of-any-length")
def of_a_hundred(step: int) -> float:
    return (100 - step) / 100


@breaks("runs-of-any-length")
def by_decades(step: int, total_steps: int) -> float:
    return 1 - (step // (total_steps // 10)) / 10


@breaks("peak-is-the-rate")
def rate(step: int, total_steps: int, peak_lr: float) -> float:
    return peak_lr * (1 - step / total_steps)


@breaks("follows-a-warm-up")
def knows_no_warm_up(step: int, total_steps: int) -> float:
    return 1 - step / total_steps


@breaks("groups-alike")
def by_calls(step: int) -> float:
    calls["all"] = calls.get("all", 0) + 1
    return 1 / (1 + calls["all"])


@breaks("holds-through-an-epoch")
def own_count(step: int) -> float:
    calls["own"] = calls.get("own", 0) + 1
    return 1 / (1 + calls["own"] // 3)


@breaks("any-step-at-once")
def recurrence(step: int) -> float:
    """Take nine tenths of the last step's factor."""
    last_step, last = calls.get("step", 0), calls.get("factor", 1.0)
    if step == 0:
        last = 1.0
    elif step != last_step:
        last *= 0.9
    calls.update(step=step, factor=last)
    return last


@breaks("continues")
def since_it_began(step: int) -> float:
    """Count steps from the one at which the run began, or went on."""
    is_jump = abs(step - calls.get("last", 0)) > 1
    calls["last"] = step
    if is_jump or step == 0:
        calls["first"] = step
    return 1 / (1 + step - calls.get("first", 0))


@breaks("draws-nothing")
def with_noise(step: int) -> float:
    return 1 - 0.01 * random.random()


@breaks("any-process")
def by_hash(step: int) -> float:
    return 1 - (hash(f"step {step}") % 97) / 100


@breaks("options-are-checked")
def untyped(step, total_steps, power=2.0):
    return (1 - step / total_steps) ** (power if isinstance(power, float) else 1.0)
