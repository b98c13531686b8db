"""Advice after an out-of-memory error: the planned need, and the next setting to try."""

from __future__ import annotations

from contextlib import suppress

from distcore import RunConfig
from distcore.lab import strategies
from distcore_workbench.planning.available import available_memory
from distcore_workbench.planning.byte_sizes import format_size
from distcore_workbench.planning.plan import Row, make_plan
from distcore_workbench.planning.request import PlanRequest


def advice(request: PlanRequest, config: RunConfig) -> str:
    """Return the end of an error line: needed and available memory, as far as known, and the
    next setting to try.

    ``request`` asks for the row of ``config``, which is resolved.
    """
    row: Row | None = None
    with suppress(Exception):  # a failed plan must not hide the error of the run
        row = make_plan(request).rows[0]
    available, known = available_memory(config.device), row is not None and row.memory is not None
    need = "the plan does not know the needed memory"
    states = 0
    if row is not None and row.memory is not None:
        states = row.memory.states + row.memory.buffers
        need = f"the plan needs {format_size(states)} per rank without activations"
        if row.step is not None:
            need = (
                f"the plan needs {format_size(row.step.peak.total)} of tensors per rank, most in"
                f" {row.step.peak.phase}"
            )
    there = f", {format_size(available)} are available" if available else ""
    is_one_row = row is not None and row.batch is not None and row.batch.rows == 1
    return f"{need}{there}; next: {next_step(config, known and 0 < available < states, is_one_row)}"


def next_step(config: RunConfig, too_large: bool = False, is_one_row: bool = False) -> str:
    """Return the next setting to try, the cheapest first.

    ``too_large``: the states alone do not fit. ``is_one_row``: the longest micro-batch cannot
    be cut any more.
    """
    rows, tokens = config.micro_batch_size, config.micro_batch_tokens
    if not too_large:
        if tokens is not None and tokens > 256 and rows != 1 and not is_one_row:
            return f"--micro-batch-tokens {tokens // 2}"
        if rows != "auto" and rows > 1 and not is_one_row:
            return f"--micro-batch-size {rows // 2}"
        if not config.gradient_checkpointing:
            return "--set gradient_checkpointing=true"
    if not strategies.load_strategy(config).capabilities.shards_parameters:
        sharding = strategies.names_that(lambda declared: declared.shards_parameters)
        return f"a strategy that shards parameters, on more devices: {sharding}"
    return "more ranks, or offload to main memory (distcore strategies)"
