"""A plan as text or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from distcore.planning.plan import Plan, Row
from distcore.planning.sizes import shown
from distcore.tables import print_cells, say, stdout_console

HEADINGS = ("strategy", "ranks", "parameters", "gradients", "optimizer", "copies", "states", "buffers", "host", "sent")


def show(plan: Plan, devices: Mapping[str, int]) -> None:
    """Print the plan; ``devices`` are the sizes to fit into, in bytes, as the user wrote them."""
    console = stdout_console()
    say(console, f"{plan.model}: {plan.parameters:,} parameters, {plan.trained:,} of them trained")
    say(console, f"tensors of a checkpoint: {shown(plan.checkpoint)}")
    known = [row for row in plan.rows if row.memory is not None]
    if known:
        console.print()
        headings = [*HEADINGS, *(f"fits {size} (states)" for size in devices)]
        print_cells(console, headings, [_cells(row, devices) for row in known], numbers=True)
        say(console, "per rank, without activations; sent: in a step of one micro-batch")
    for row in plan.rows:
        if row.memory is None:
            say(console, f"{row.strategy} on {row.ranks} rank(s): not known: {row.reason}")


def as_json(plan: Plan, devices: Mapping[str, int]) -> str:
    """Return the plan as JSON: all sizes in bytes."""
    tree = dataclasses.asdict(plan)
    for found, row in zip(tree["rows"], plan.rows, strict=True):
        if row.memory is not None:
            found["memory"]["states"] = row.memory.states
            found["states_fit"] = {size: _fits(row, limit) for size, limit in devices.items()}
    return json.dumps(tree, indent=2)


def _cells(row: Row, devices: Mapping[str, int]) -> list[str]:
    memory = row.memory
    assert memory is not None
    sizes = (
        memory.parameters, memory.gradients, memory.optimizer, memory.copies, memory.states, memory.buffers,
        memory.host, memory.sent + memory.sent_each,
    )  # fmt: skip
    fits = ("yes" if _fits(row, limit) else "no" for limit in devices.values())
    return [row.strategy, str(row.ranks), *map(shown, sizes), *fits]


def _fits(row: Row, limit: int) -> bool:
    """Return True if states and buffers take no more than ``limit``; activations come on top."""
    return row.memory is not None and row.memory.states + row.memory.buffers <= limit
