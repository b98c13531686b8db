"""The phases of a step: their share of communication in a trace, and the table of a profile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distcore.distributed import COLLECTIVES

PHASES = ("data_wait", "forward", "backward", "optimizer", "logging", "rest")
"""The parts of a step; together they make up all of its time."""

Span = tuple[float, float]
"""Start and end, in microseconds."""


def communication(events: Iterable[Any]) -> dict[str, float] | None:
    """Return the share of each phase, from 0 to 1, in which a collective ran.

    ``events`` are the events of a trace. ``None`` without a collective.
    """
    spans: list[Span] = []
    phases: dict[str, list[Span]] = {phase: [] for phase in PHASES}
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(COLLECTIVES):
            spans.append(span)
        elif event.name.startswith("distcore:") and event.device_type.name == "CPU":
            phases[event.name.removeprefix("distcore:")].append(span)
    busy = union(spans)
    if not busy:
        return None
    return {phase: _share(parts, busy) for phase, parts in phases.items()}


def _share(parts: list[Span], busy: list[Span]) -> float:
    """Return the fraction of the time in ``parts`` that ``busy`` covers, 0 to 1; 0 of no time."""
    whole = sum(end - start for start, end in parts)
    if not whole:
        return 0.0
    covered = sum(overlap(span, busy) for span in parts)
    return covered / whole


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans, in order of time: collectives at the same time count once."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if not joined or start > joined[-1][1]:
            joined.append((start, end))
            continue
        last_start, last_end = joined[-1]
        joined[-1] = (last_start, max(end, last_end))
    return joined


def overlap(span: Span, others: Iterable[Span]) -> float:
    """Return how much of ``span`` is covered by ``others``, which do not overlap each other."""
    span_start, span_end = span
    covered = 0.0
    for start, end in others:
        covered += max(0.0, min(span_end, end) - max(span_start, start))
    return covered


def table(facts: dict[str, Any]) -> str:
    """Return the table of phases: milliseconds per step, share of the step, communication.

    Communication is the milliseconds in which a collective ran; ``facts`` is the content of
    ``profile.json``.
    """
    seconds = facts["seconds_per_step"]
    communicating = facts["communication_in"]
    lines = [f"profile of {facts['steps']} steps, rank 0:    ms/step    share  of it communicating"]
    for phase in (*PHASES, "total"):
        name = phase.replace("_", " ")
        milliseconds = seconds[phase] * 1e3
        share = f"{seconds[phase] / seconds['total']:.1%}"
        if communicating is None:
            communication = "-"
        else:
            # "total" is no phase of its own: it is the sum over all of them.
            part = communicating.get(phase, sum(communicating.values()))
            communication = f"{part * 1e3:.2f}"
        lines.append(f"  {name:<28}{milliseconds:>10.2f}{share:>9}{communication:>22}")
    return "\n".join(lines)
