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
    """Regular expression: found in the names of the parameters that this phase steps. Others have no gradient."""
    loss: Callable[..., Losses]
    """Returns the sum of the loss over the items of a batch, like ``loss`` of a task."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Settings for these parameters: ``lr``, or ``lr_scale``, a factor of the run's rate, ``weight_decay``, and others
    that the run's optimizer has for each of its groups, such as ``betas``. ``optimizer.groups`` takes precedence."""


def parameters_by_phase(phases: Mapping[str, Phase], trained: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the names of the parameters that each phase steps; raises TaskError unless each steps some, and all do."""
    names = list(trained)
    stepped = {phase: frozenset(n for n in names if re.search(phases[phase].match, n)) for phase in phases}
    if empty := next((phase for phase in phases if not stepped[phase]), None):
        some = ", ".join(names[:: max(1, len(names) // 5)][:5])
        raise TaskError(
            f"task: phases()[{empty!r}].match = {phases[empty].match!r}: is found in no trained parameter's name; "
            f"names are such as {some}"
        )
    if phases and (left := next((name for name in names if not any(name in own for own in stepped.values())), None)):
        raise TaskError(f"task: phases() has no phase for the parameter {left!r}; add it to a pattern, or freeze it")
    return stepped


def settings_of(phases: Mapping[str, Phase], name: str) -> dict[str, Any]:
    """Return the optimizer's settings for the parameter ``name``: those of the first phase that steps it."""
    return dict(next((phase.optimizer for phase in phases.values() if re.search(phase.match, name)), {}))
