"""The table of a comparison: on the screen, as Markdown, and as cells for the page."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from distcore.cli import print_cells, say, stdout_console
from distcore_workbench.compare.facts import Facts
from distcore_workbench.report.side_by_side import NOT_AVAILABLE, Cell, markdown_table, number

FILE_WIDTH = 200
"""Characters per line where stdout is not a terminal."""
MARK = "≠"
"""Follows the name of a row that has notes, such as a difference from the reference."""


def show(facts: Facts) -> None:
    """Print the table, its columns folded on a narrow screen, and below it the
    remarks on single rows.
    """
    console = stdout_console(FILE_WIDTH)
    rows = [cells(row, facts) for row in facts["rows"] if has_run(row)]
    print_cells(console, headings(facts), rows, numbers=True)
    for line in remarks(facts):
        say(console, line)


def markdown(facts: Facts) -> str:
    """Return the table, the remarks and the explanations as a Markdown page."""
    rows = [cells(row, facts) for row in facts["rows"] if has_run(row)]
    table = markdown_table(headings(facts), rows)
    notes = "".join(f"- {line}\n" for line in remarks(facts))
    explained = "".join(f"- {line}\n" for line in explanations(facts))
    return (
        f"# Strategies compared\n\n`{facts['command']}`\n\n{table}\n\n{notes}\n## How it was"
        f" measured\n\n{explained}"
    )


def headings(facts: Facts) -> list[str]:
    """Return the column headings."""
    return ["row", *columns(facts)]


def cells(row: Facts, facts: Facts) -> list[str]:
    """Return the cells of a row that has run."""
    name = f"{row['name']} {MARK}" if row["notes"] else row["name"]
    return [name, *(cell(row) for cell in columns(facts).values())]


def columns(facts: Facts) -> dict[str, Cell]:
    """Map each heading after the first to the function that makes its cell."""
    several = facts["rounds"] > 1
    return {
        "ranks": lambda row: f"{row['world_size']} × {row['threads']} thr.",
        "wall s": lambda row: number(row["wall_seconds"], 1),
        "start-up s": lambda row: number(row["start_up_seconds"], 1),
        "warm-up s": lambda row: number(row["warm_up_seconds"], 2),
        "training s": lambda row: number(row["training_seconds"], 2),
        "samples/s": lambda row: _speed(row, several),
        "p50 ms": lambda row: _milliseconds(row["step_p50_seconds"]),
        "p95 ms": lambda row: _milliseconds(row["step_p95_seconds"]),
        "comm. ms/step": _communication,
        "peak MiB/rank": lambda row: number(row["peak_memory_bytes"] / 2**20, 0),
        **{name: partial(_metric, name) for name in facts["metrics"]},
        "max |Δ|": lambda row: _difference(row["distance"], "largest"),
        "rel. Δ": lambda row: _difference(row["distance"], "relative"),
    }


def remarks(facts: Facts) -> Iterator[str]:
    """Yield one line per remark on a single row: failed, left out, different from the reference."""
    if not facts["complete"]:
        yield "interrupted: some runs are missing"
    if facts.get("foreign_load"):
        yield (
            f"load average {facts['foreign_load']:.1f} when it began: other programs were at work,"
            " or just had been"
        )
    for row in facts["rows"]:
        if row["failed"]:
            yield f"{row['name']}: failed: {row['failed']}"
        if row["cannot_run"]:
            yield f"{row['name']}: left out: {row['cannot_run']}"
        yield from (f"{row['name']} {MARK} {note}" for note in row["notes"])
        if row.get("other_bits"):
            yield _bits(row, facts)
        again = row.get("distance_between_rounds")
        if again and again["largest"]:
            yield (
                f"{row['name']}: not reproducible bit for bit: max |Δ| between rounds"
                f" {again['largest']:.1e}"
            )


def explanations(facts: Facts) -> Iterator[str]:
    """Yield sentences that say how each number was measured."""
    warm, rounds = facts["warm_up_steps"], facts["rounds"]
    order = (
        "rows one after the other"
        if not facts["interleaved"]
        else "every second round in the opposite order"
    )
    yield (
        f"{rounds} round(s), {order if rounds > 1 else 'one after the other'}; each run is a"
        " process of its own."
    )
    yield (
        "Wall: start to end of the process; start-up: start to the first step; rest: evaluation,"
        " saving, shutdown."
    )
    yield (
        f"Warm-up: the extra time of the first {warm} steps over median steps (compilation,"
        " allocation, connecting)."
    )
    yield (
        f"Speed and step times: without those {warm} steps, evaluations and checkpoints; medians"
        " over rounds."
    )
    yield (
        "Communication: the time per step in which rank 0 was in a collective, waiting for other"
        " ranks included, while computing or not; from a short traced run that is not timed."
        f" {NOT_AVAILABLE}: not measured, or the backend communicates outside of torch.distributed."
    )
    yield (
        "Memory: the largest over all ranks; on a GPU that of the tensors, on a CPU the resident"
        " set of the process."
    )
    yield (
        f"Δ: difference of the final parameters from those of {facts['reference']}: the largest one"
        " (max), and the L2 norm of all differences divided by that of the parameters (rel.)."
        " Rounding alone makes it small, not zero."
    )
    if facts["job"].get("exact"):
        yield (
            "Other bits: elements of weights and moments that differ in any bit, and metrics of"
            " the last evaluation that do."
        )
    elif facts["job"].get("task_options.dropout") != 0:
        yield (
            "Dropout may be on, and its masks depend on the number of ranks: with --dropout 0, Δ is"
            " rounding alone."
        )


def has_run(row: Facts) -> bool:
    """True if a round of the row has succeeded."""
    return bool(row.get("rounds"))


def _bits(row: Facts, facts: Facts) -> str:
    """Return the line that says in how many bits a row differs from the reference."""
    bits, reference = row["other_bits"], facts["reference"]
    line = f"{row['name']}: {bits['differing']:,} of {bits['elements']:,} elements of weights and"
    line += f" moments have other bits than those of {reference}"
    if bits["differing"]:
        line += f", most of them in {bits['tensor']}"
    (base,) = (other for other in facts["rows"] if other["name"] == reference)
    other = [name for name, value in row["metrics"].items() if value != base["metrics"][name]]
    return f"{line}; so have {', '.join(other)}" if other else f"{line}; the metrics are the same"


def _metric(name: str, row: Facts) -> str:
    return number(row["metrics"][name], 4)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _speed(row: Facts, several: bool) -> str:
    lowest, highest = row["samples_per_second_range"]
    spread = f" ({lowest:.1f} … {highest:.1f})" if several else ""
    return f"{row['samples_per_second']:.1f}{spread}"


def _communication(row: Facts) -> str:
    if row["world_size"] == 1:
        return "none"
    seconds = row["communication_seconds"]
    return NOT_AVAILABLE if seconds is None else _milliseconds(seconds)


def _difference(distance: Facts | None, key: str) -> str:
    if distance is None:
        return NOT_AVAILABLE
    value = distance[key]  # null in JSON stands for infinity
    return "∞" if value is None else "0" if not value else f"{value:.1e}"
