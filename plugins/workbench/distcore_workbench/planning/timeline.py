"""The memory in use during a step, by purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["start", "forward", "backward", "step"]
"""The start of a job, or a part of a step, which has the next two for each micro-batch; averaging
over ranks is in ``backward`` where a strategy does it there.
"""
KINDS = ("parameters", "gradients", "optimizer", "activations")
"""The purposes of memory."""
POINTS = 240
"""Most moments of a timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The bytes that live after some operation of a step."""

    phase: Phase
    """The part of the step."""
    parameters: int
    """Parameters, or this rank's shards of them."""
    gradients: int
    """The gradients with which the optimizer steps."""
    optimizer: int
    """The optimizer's state, and copies of parameters that it updates."""
    activations: int
    """Everything else: buffers of the model, the batch, gathered
    parameters and intermediate results.
    """

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
            replace(
                moment,
                **{kind: min(getattr(moment, kind), limit) for kind, limit in limits.items()},
            )
            for moment in self.moments
        )
        return Step(peak=max(moments, key=lambda moment: moment.total), moments=moments)

    def after(self, start: Moment) -> Step:
        """Return the step with the peak of the ``start``, if that is higher."""
        return (
            self
            if start.total <= self.peak.total
            else Step(peak=start, moments=(start, *self.moments))
        )


def timeline(
    changes: Sequence[tuple[int, int]],
    marks: Sequence[tuple[int, Phase]],
    kinds: Sequence[frozenset[int] | set[int]],
) -> Step:
    """Return the step in ``changes``, each the number of a storage and by how many bytes
    more of it live.

    ``marks`` are where phases begin, in order; ``kinds`` the storages
    of parameters, gradients, optimizer.
    """
    kind_of = {
        number: kind for kind, numbers in reversed(list(enumerate(kinds))) for number in numbers
    }
    held, (start, phase), phase_from = [0, 0, 0, 0], marks[0], dict(marks)
    for number, change in changes[:start]:
        held[kind_of.get(number, 3)] += change
    stretch = -(-(len(changes) - start) // POINTS)
    moments = list[Moment]()
    fullest: tuple[int, Phase, tuple[int, ...]] = (-1, phase, (0, 0, 0, 0))
    for at in range(start, len(changes)):
        number, change = changes[at]
        phase = phase_from.get(at, phase)
        held[kind_of.get(number, 3)] += change
        if (total := sum(held)) > fullest[0]:
            fullest = (total, phase, tuple(held))
        if (at + 1 - start) % stretch == 0 or at + 1 == len(changes) or at + 1 in phase_from:
            moments.append(_moment(fullest))
            fullest = (-1, phase, (0, 0, 0, 0))
    return Step(peak=max(moments, key=lambda moment: moment.total), moments=tuple(moments))


def _moment(largest: tuple[int, Phase, tuple[int, ...]]) -> Moment:
    _, phase, (parameters, gradients, optimizer, activations) = largest
    return Moment(
        phase=phase,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
    )
