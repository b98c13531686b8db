"""The schedule of a run: the function that the config names, with its options and the run's length.

A schedule is a function of the step, so a resumed run enters it at any step, and each group of
parameters follows it at a rate of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from distcore.config import RunConfig
from distcore.errors import ConfigError, raised_at
from distcore.hints import nearest
from distcore.model.schedules import SCHEDULES, SUPPLIED, load_schedule
from distcore.plugin.options import build, values_of

SAMPLES = 64
"""Steps at which a schedule is tried before any rank starts."""
Factor = Callable[[int], float]
"""The factor of the peak rate, by the number of optimizer steps."""


def schedule_options(config: RunConfig) -> dict[str, Any]:
    """Return all options of the schedule by name, as JSON values; raises DistcoreError."""
    name, values = config.schedule.name, config.schedule.options
    parameters = _options(name)
    for option in values:
        if option not in parameters:
            keys = type(config.schedule).model_fields
            listed = ", ".join(parameters) or "no options"
            raise ConfigError(
                f"unknown key 'schedule.{option}'{nearest(option, [*parameters, *keys])}: {name}"
                f" has {listed}"
            )
    try:
        return values_of(build("schedule", name, schedule_class(name), values))
    except TypeError as error:
        raise ConfigError(
            f"schedule.name = {name!r}: an option has a value that no config file can have: {error}"
        ) from None


def factor_of(config: RunConfig, total_steps: int, steps_per_epoch: int) -> Factor:
    """Return the schedule of a run of so many steps, for steps after its warm-up.

    The factor raises ConfigError where the schedule gives no number, or fails.
    """
    name = config.schedule.name
    function = load_schedule(name)
    supplied = {
        "warmup_steps": warmup_steps(config, total_steps),
        "total_steps": total_steps,
        "steps_per_epoch": steps_per_epoch,
        "peak_lr": config.lr,
        "decay_ratio": config.schedule.decay_ratio,
    }
    taken = {key: supplied[key] for key in supplied if key in _parameters(name, function)}
    return partial(_factor, name, partial(function, **taken, **schedule_options(config)))


def lambda_scheduler(
    factor: Factor, optimizer: Optimizer, warmup: int, interval: int = 1
) -> LambdaLR:
    """Return torch's scheduler, to be stepped once per optimizer step.

    ``warmup`` is the number of steps in which the rate rises to its peak. The rate changes every
    ``interval`` steps. Groups with rates of their own follow the same factor.
    """
    # A partial, not a function: LambdaLR saves a state for it, and checkpoints have always had
    # that (empty) state.
    return LambdaLR(optimizer, partial(_warmed_up, factor=factor, warmup=warmup, interval=interval))


def warmup_steps(config: RunConfig, total_steps: int) -> int:
    """Return the number of warm-up steps: as configured, or ``warmup_ratio`` of ``total_steps``."""
    steps = config.schedule.warmup_steps
    return steps if isinstance(steps, int) else round(config.schedule.warmup_ratio * total_steps)


def check_factors(config: RunConfig, total_steps: int, steps_per_epoch: int) -> None:
    """Raise ConfigError if a schedule that is not the core's own gives no factors for this run, or
    gives others for the same step.
    """
    name = config.schedule.name
    if name in SCHEDULES:
        return
    factor = factor_of(config, total_steps, steps_per_epoch)
    first = min(warmup_steps(config, total_steps), total_steps)
    # The step after the last one counts, too: the scheduler computes its rate.
    stride = max(1, (total_steps - first) // SAMPLES)
    steps = sorted({*range(first, total_steps, stride), total_steps})
    forwards = {step: factor(step) for step in steps}
    for step in reversed(steps):
        again = factor(step)
        if again != forwards[step]:
            raise ConfigError(
                f"schedule.name = {name!r}: gave {forwards[step]:g} and then {again:g} for step"
                f" {step}: a resumed run would have other rates; compute the factor from the step"
                " alone"
            )


def _warmed_up(step: int, *, factor: Factor, warmup: int, interval: int) -> float:
    """Return the factor of a schedule with a linear warm-up, constant within each interval."""
    step -= step % interval
    if step < warmup:
        return step / max(1, warmup)
    return factor(step)


def _factor(name: str, function: Callable[..., float], step: int) -> float:
    """Return the factor that a schedule gives; raises ConfigError if that is none."""
    try:
        given = function(step=step)
        factor = float(given)
    except Exception as error:  # of the user's code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"schedule.name = {name!r}: failed at step {step}: {reason}{raised_at(error)}"
        ) from error
    if not 0 <= factor < math.inf:
        raise ConfigError(
            f"schedule.name = {name!r}: gave {given!r} for step {step}; expected the factor of the"
            " learning rate, a number from 0 on"
        )
    return factor


def _parameters(name: str, function: Callable[..., float]) -> Mapping[str, inspect.Parameter]:
    """Return a schedule's parameters by name; raises ConfigError if it takes no step."""
    is_class = isinstance(function, type)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no callable, or one without a signature
        signature = inspect.Signature()
    named = {
        key: parameter
        for key, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if is_class or "step" not in named:
        what = "is a class" if is_class else "takes no step"
        raise ConfigError(
            f"schedule.name = {name!r}: {what}; expected a function such as"
            " def mine(step, total_steps), which returns the factor of the learning rate"
        )
    return named


def _options(name: str) -> list[str]:
    """Return the names of a schedule's options."""
    return [field.name for field in dataclasses.fields(schedule_class(name))]


def schedule_class(name: str) -> type[Any]:
    """Return a dataclass with a field for each option of a schedule, of the annotated type."""
    function = load_schedule(name)
    types = _types(function)
    fields = []
    for key, parameter in _parameters(name, function).items():
        if key in SUPPLIED:
            continue
        fields.append((key, types.get(key, Any), _field(parameter.default)))
    return dataclasses.make_dataclass("Options", fields, frozen=True, kw_only=True)


def _field(default: Any) -> Any:
    """Return the dataclass field of a parameter with this default, if any."""
    if default is inspect.Parameter.empty:
        return dataclasses.field()
    if type(default).__hash__ is None:  # a list, which dataclasses refuse as a default
        return dataclasses.field(default_factory=lambda: default)
    return dataclasses.field(default=default)


def _types(function: Callable[..., float]) -> dict[str, Any]:
    """Return the annotations of a function; none where one of them cannot be resolved."""
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}
