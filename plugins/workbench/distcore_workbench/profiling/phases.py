"""The phases of a step: how much of each is communication, by a trace, and the
table of a profile.
"""

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
    return {name: _share(parts, busy) for name, parts in phases.items()} if busy else None


def _share(parts: list[Span], busy: list[Span]) -> float:
    """Return which part of the time in ``parts`` is covered by ``busy``."""
    whole = sum(end - start for start, end in parts)
    return sum(overlap(span, busy) for span in parts) / whole if whole else 0.0


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans, in order of time: collectives that run at the
    same time count once.
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def overlap(span: Span, others: Iterable[Span]) -> float:
    """Return how much of ``span`` is covered by ``others``, which do not overlap each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def table(facts: dict[str, Any]) -> str:
    """Return the table of phases: milliseconds per step, share of the step, milliseconds
    with a collective running.
    """
    seconds, inside = facts["seconds_per_step"], facts["communication_in"]
    lines = [f"profile of {facts['steps']} steps, rank 0:    ms/step    share  of it communicating"]
    for phase in (*PHASES, "total"):
        share = f"{seconds[phase] / seconds['total']:.1%}"
        part = inside.get(phase, sum(inside.values())) * 1e3 if inside is not None else None
        shown = f"{part:.2f}" if part is not None else "-"
        lines.append(
            f"  {phase.replace('_', ' '):<28}{seconds[phase] * 1e3:>10.2f}{share:>9}{shown:>22}"
        )
    return "\n".join(lines)
