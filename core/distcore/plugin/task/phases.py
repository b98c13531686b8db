"""Phases of a step: several losses, each of which trains its own parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distcore.errors import TaskError

if TYPE_CHECKING:
    from distcore.plugin.task.task import Losses


@dataclass(frozen=True)
class Phase:
    """One phase of each optimizer step."""

    match: str
    """Regular expression. This phase steps the parameters whose names match somewhere;
    others get no gradient.
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
    """Return the names that each phase steps. Raises TaskError for a phase or a
    parameter without the other.
    """
    names = list(trained)
    names_of = {
        phase: frozenset(n for n in names if re.search(phases[phase].match, n)) for phase in phases
    }
    if empty := next((phase for phase in phases if not names_of[phase]), None):
        examples = ", ".join(names[:: max(1, len(names) // 5)][:5])
        raise TaskError(
            f"task: phases()[{empty!r}].match = {phases[empty].match!r}: matches no trained"
            f" parameter's name; names are such as {examples}"
        )
    if phases and (
        left := next(
            (name for name in names if not any(name in own for own in names_of.values())), None
        )
    ):
        raise TaskError(
            f"task: phases() has no phase for the parameter {left!r}; add it to a pattern, or"
            " freeze it"
        )
    return names_of


def settings_of(phases: Mapping[str, Phase], name: str) -> dict[str, Any]:
    """Return the optimizer's settings for the parameter ``name``: those of the first
    phase that steps it.
    """
    return dict(
        next((phase.optimizer for phase in phases.values() if re.search(phase.match, name)), {})
    )
