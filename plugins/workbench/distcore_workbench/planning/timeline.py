"""The memory in use during a step, by purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["start", "forward", "backward", "step"]
"""The start of a job, or a part of a step.

A step has ``forward`` and ``backward`` for each micro-batch. Averaging over ranks is in
``backward`` where a strategy does it there.
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
    """All else: buffers of the model, the batch, gathered parameters, intermediate results."""

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
        """Return the step with no more bytes of each kind than ``limits``."""
        moments = []
        for moment in self.moments:
            sizes = {kind: min(getattr(moment, kind), limit) for kind, limit in limits.items()}
            moments.append(replace(moment, **sizes))
        peak = max(moments, key=lambda moment: moment.total)
        return Step(peak=peak, moments=tuple(moments))

    def after(self, start: Moment) -> Step:
        """Return the step with the peak of the ``start``, if that is higher."""
        if start.total <= self.peak.total:
            return self
        return Step(peak=start, moments=(start, *self.moments))


def timeline(
    changes: Sequence[tuple[int, int]],
    marks: Sequence[tuple[int, Phase]],
    kinds: Sequence[frozenset[int] | set[int]],
) -> Step:
    """Return the step in ``changes``: the number of a storage, and the bytes that it grew by.

    ``marks`` are the positions at which phases begin, in order; ``kinds`` the numbers of the
    storages of parameters, gradients, optimizer.
    """
    kind_of: dict[int, int] = {}
    # A storage in several sets is of the first of them.
    for kind, numbers in enumerate(kinds):
        for number in numbers:
            kind_of.setdefault(number, kind)
    activations = len(kinds)
    bytes_by_kind = [0, 0, 0, 0]
    start, phase = marks[0]
    phase_from = dict(marks)
    for number, change in changes[:start]:
        bytes_by_kind[kind_of.get(number, activations)] += change
    stretch = -(-(len(changes) - start) // POINTS)
    moments: list[Moment] = []
    fullest: Moment | None = None
    for index in range(start, len(changes)):
        number, change = changes[index]
        phase = phase_from.get(index, phase)
        bytes_by_kind[kind_of.get(number, activations)] += change
        if fullest is None or sum(bytes_by_kind) > fullest.total:
            fullest = _moment(phase, bytes_by_kind)
        end = index + 1
        if (end - start) % stretch == 0 or end == len(changes) or end in phase_from:
            moments.append(fullest)
            fullest = None
    peak = max(moments, key=lambda moment: moment.total)
    return Step(peak=peak, moments=tuple(moments))


def _moment(phase: Phase, bytes_by_kind: Sequence[int]) -> Moment:
    """Return the moment with these bytes, which are in the order of ``KINDS``."""
    parameters, gradients, optimizer, activations = bytes_by_kind
    return Moment(
        phase=phase,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
    )
