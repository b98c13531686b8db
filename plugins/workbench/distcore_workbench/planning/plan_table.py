"""A plan as text or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from distcore.cli import print_cells, say, stdout_console
from distcore.distributed import memory_overhead
from distcore_workbench.planning.byte_sizes import format_size
from distcore_workbench.planning.longest import Batch
from distcore_workbench.planning.plan import MemoryPlan, Row

HEADINGS = (
    "strategy",
    "ranks",
    "parameters",
    "gradients",
    "optimizer",
    "copies",
    "states",
    "activations",
    "peak",
    "peak in",
    "buffers",
    "host",
    "sent",
)
UNKNOWN = "–"


def show(plan: MemoryPlan, devices: Mapping[str, int]) -> None:
    """Print the plan; ``devices`` are the sizes to fit into, in bytes, as the user wrote them."""
    console = stdout_console()
    say(console, f"{plan.model}: {plan.parameters:,} parameters, {plan.trained:,} of them trained")
    say(console, f"a checkpoint has {format_size(plan.checkpoint)} of tensors")
    rows_with_memory = [row for row in plan.rows if row.memory is not None]
    if rows_with_memory:
        console.print()
        headings = ["strategy, ranks", *HEADINGS[2:], *(f"fits {size}" for size in devices)]
        # Name and ranks share a cell: columns that do not fit continue below, next to the
        # first column only.
        table = [
            (f"{name}, {ranks}", *sizes)
            for name, ranks, *sizes in (cells(row, devices) for row in rows_with_memory)
        ]
        print_cells(console, headings, table, numbers=True)
        for line in remarks(plan):
            say(console, line)
    for row in plan.rows:
        if row.memory is None:
            say(console, f"{row.strategy} on {row.world} rank(s): not known: {row.reason}")


def remarks(plan: MemoryPlan) -> list[str]:
    """Return the lines below the table: the subject of the figures, and unknown ones."""
    lines = ["sizes are per rank; sent: bytes in a step of one micro-batch"]
    batches: dict[Batch, list[str]] = {}
    for row in plan.rows:
        if row.batch is not None:
            batches.setdefault(row.batch, []).append(f"{row.strategy} on {row.world}")
    padding = "padded to the longest row" if plan.padded else "without padding"
    for batch, names in batches.items():
        of = f" ({', '.join(names)})" if len(batches) > 1 else ""
        lines.append(
            f"longest micro-batch{of}: {batch.rows} row(s) of up to {batch.longest} tokens,"
            f" {padding}"
        )
    lines += [
        f"{row.strategy} on {row.world}: with {row.global_batch_size} rows in a step; so many ranks"
        f" cannot share {plan.global_batch_size} equally"
        for row in plan.rows
        if row.global_batch_size > plan.global_batch_size
    ]
    if plan.device != "cpu" and batches:
        how = f"traced on a CPU, with dropout and attention as on {plan.device}"
        lines.append(f"activations and peak are an estimate for {plan.device}: {how}")
        lines += [f"{name}: {size}" for name, size in memory_overhead(plan.device).items()]
    reasons: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.untraced:
            reasons.setdefault(row.untraced, []).append(f"{row.strategy} on {row.world}")
    lines += [
        f"{', '.join(rows)}: activations are not known: {reason}"
        for reason, rows in reasons.items()
    ]
    return lines


def as_json(plan: MemoryPlan, devices: Mapping[str, int]) -> str:
    """Return the plan as JSON, all sizes in bytes.

    Its key ``beside`` says in words what a device needs besides tensors.
    """
    tree = dataclasses.asdict(plan) | {
        "estimate": plan.device != "cpu",
        "beside": memory_overhead(plan.device),
    }
    for entry, row in zip(tree["rows"], plan.rows, strict=True):
        if row.memory is not None:
            entry["memory"]["states"] = row.memory.states
            entry["fits"] = {size: fits(row, limit) for size, limit in devices.items()}
        if row.step is not None:
            entry["step"]["peak"]["total"] = row.step.peak.total
    return json.dumps(tree, indent=2)


def cells(row: Row, devices: Mapping[str, int]) -> list[str]:
    """Return the cells of a row whose states are known, below ``HEADINGS`` and
    the sizes of ``devices``.
    """
    memory, step = row.memory, row.step
    assert memory is not None
    states = (memory.parameters, memory.gradients, memory.optimizer, memory.copies, memory.states)
    peak = (
        (format_size(step.peak.activations), format_size(step.peak.total), step.peak.phase)
        if step
        else [UNKNOWN] * 3
    )
    others = (memory.buffers, memory.host)
    sent = UNKNOWN if memory.sent is None else format_size(memory.sent + memory.sent_each)
    fit = (
        (("yes" if fits(row, limit) else "no") + ("" if step else " (states)"))
        for limit in devices.values()
    )
    return [
        row.strategy,
        row.world,
        *map(format_size, states),
        *peak,
        *map(format_size, others),
        sent,
        *fit,
    ]


def fits(row: Row, limit: int) -> bool:
    """Return True if the peak takes no more than ``limit``; where it is not
    known, states and buffers.
    """
    if row.step is not None:
        return row.step.peak.total <= limit
    return row.memory is not None and row.memory.states + row.memory.buffers <= limit
