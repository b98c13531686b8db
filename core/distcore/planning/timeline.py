"""What lives over a step, by what it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

PHASES = ("forward", "backward", "step")
"""The parts of a step in order; averaging over ranks is in ``backward`` where a strategy does it there."""
KINDS = ("parameters", "gradients", "optimizer", "activations")
"""What memory is used for."""
POINTS = 240
"""Most moments of a timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The bytes that live after some operation of a step."""

    phase: str
    """One of ``PHASES``."""
    parameters: int
    """Parameters, or this rank's shards of them."""
    gradients: int
    """What is a parameter's gradient when the optimizer steps."""
    optimizer: int
    """What the optimizer keeps from step to step, and copies of parameters that it steps."""
    activations: int
    """All that is none of these: buffers of the model, the batch, and what is gathered or computed for a while."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The memory of one optimizer step that is not the first."""

    peak: Moment
    """When most lives."""
    moments: tuple[Moment, ...]
    """At most some ``POINTS``, in order: the fullest of each stretch of operations."""

    def within(self, limits: Mapping[str, int]) -> Step:
        """Return the step with no more of each kind than ``limits``, in bytes, say."""
        moments = tuple(
            replace(moment, **{kind: min(getattr(moment, kind), limit) for kind, limit in limits.items()})
            for moment in self.moments
        )
        return Step(peak=max(moments, key=lambda moment: moment.total), moments=moments)


def timeline(
    changes: Sequence[tuple[int, int]], marks: Sequence[int], kinds: Sequence[frozenset[int] | set[int]]
) -> Step:
    """Return the step in ``changes``, each the number of a storage and by how many bytes more of it live.

    ``marks`` are where forward, backward and step begin; ``kinds`` the storages of parameters, gradients, optimizer.
    """
    kind_of = {number: kind for kind, numbers in reversed(list(enumerate(kinds))) for number in numbers}
    held = [0, 0, 0, 0]
    for number, change in changes[: marks[0]]:
        held[kind_of.get(number, 3)] += change
    stretch = -(-(len(changes) - marks[0]) // POINTS)
    moments = list[Moment]()
    fullest: tuple[int, str, tuple[int, ...]] = (-1, PHASES[0], (0, 0, 0, 0))
    for at in range(marks[0], len(changes)):
        number, change = changes[at]
        held[kind_of.get(number, 3)] += change
        if (total := sum(held)) > fullest[0]:
            fullest = (total, _phase(at, marks), tuple(held))
        if (at + 1 - marks[0]) % stretch == 0 or at + 1 == len(changes) or at + 1 in marks:
            moments.append(_moment(fullest))
            fullest = (-1, PHASES[0], (0, 0, 0, 0))
    return Step(peak=max(moments, key=lambda moment: moment.total), moments=tuple(moments))


def _phase(at: int, marks: Sequence[int]) -> str:
    return next(name for name, mark in reversed(list(zip(PHASES, marks, strict=True))) if at >= mark)


def _moment(found: tuple[int, str, tuple[int, ...]]) -> Moment:
    _, phase, (parameters, gradients, optimizer, activations) = found
    return Moment(phase=phase, parameters=parameters, gradients=gradients, optimizer=optimizer, activations=activations)
