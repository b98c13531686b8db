"""Phases of a step: several losses, each of which trains its own parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distcore.errors import TaskError
from distcore.hints import samples_of

if TYPE_CHECKING:
    from distcore.plugin.task.task import Losses


@dataclass(frozen=True)
class Phase:
    """One phase of each optimizer step."""

    match: str
    """Regular expression: this phase steps the parameters whose names match somewhere.

    Others get no gradient.
    """
    loss: Callable[..., Losses]
    """Returns the sum of the loss over the items of a batch, like ``loss`` of a task."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Settings for these parameters: ``lr`` or ``lr_scale`` (a factor of the run's rate),
    ``weight_decay``, and others that the optimizer takes per group, such as ``betas``.
    ``optimizer.groups`` of the config takes precedence.
    """


def parameters_by_phase(
    phases: Mapping[str, Phase], trained: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Return the names that each phase steps.

    Raises TaskError for a phase without a parameter, and for a parameter without a phase.
    """
    names = list(trained)
    names_of = {
        name: frozenset(n for n in names if re.search(phase.match, n))
        for name, phase in phases.items()
    }
    for name, phase in phases.items():
        if not names_of[name]:
            examples = ", ".join(samples_of(names))
            raise TaskError(
                f"task: phases()[{name!r}].match = {phase.match!r}: matches no trained"
                f" parameter's name; names are such as {examples}"
            )
    stepped = {name for names_of_phase in names_of.values() for name in names_of_phase}
    left = [name for name in names if name not in stepped]
    if phases and left:
        raise TaskError(
            f"task: phases() has no phase for the parameter {left[0]!r}; add it to a pattern, or"
            " freeze it"
        )
    return names_of


def settings_of(phases: Mapping[str, Phase], name: str) -> dict[str, Any]:
    """Return the optimizer's settings for a parameter: of the first phase that steps it."""
    for phase in phases.values():
        if re.search(phase.match, name):
            return dict(phase.optimizer)
    return {}
