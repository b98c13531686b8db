"""How much memory a job may take here, and how much it needs at the least: what does not fit is not started."""

from __future__ import annotations

import copy

from torch import nn

from distcore.config import RunConfig
from distcore.distributed.devices import total_memory
from distcore.engine.optim import optimizer_factory
from distcore.engine.resolve import build_strategy
from distcore.errors import DistcoreError
from distcore.planning.available import machine_limits, process_limits
from distcore.planning.sizes import shown
from distcore.plugin.memory import Memory, PlansMemory


def planned(config: RunConfig, skeleton: nn.Module) -> Memory | None:
    """Return what the rank with most holds of a resolved config, as ``distcore plan`` has it; ``None``: not known.

    Activations are not in it.
    """
    strategy = build_strategy(config)
    if not isinstance(strategy, PlansMemory):
        return None
    try:
        return strategy.plan_memory(config, copy.deepcopy(skeleton), int(config.nproc), optimizer_factory(config))
    except DistcoreError:
        return None


def needed(memory: Memory, device: str) -> int:
    """Return the bytes that a rank needs at the least; where it computes in main memory, offload spares none."""
    return memory.states + memory.buffers + (memory.host if device == "cpu" else 0)


def why_not(config: RunConfig, memory: Memory | None) -> str:
    """Return in one line why a resolved config cannot fit here; empty if it may, or if that is not known."""
    if memory is None:
        return ""
    need, ranks = needed(memory, config.device), int(config.nproc)
    if config.device != "cpu":
        total = total_memory(config.device)
        return _over(need, total, f"a device of kind {config.device!r} has") if total else ""
    each = min(process_limits(), default=None)
    said = _over(need, each, "a process here may take") if each else ""
    return said or _over(need * ranks, min(machine_limits()), f"{ranks} rank(s) have")


def _over(need: int, limit: int, who: str) -> str:
    return f"needs {shown(need)} beside its activations, and {who} {shown(limit)}" if need > limit else ""
