"""How much memory a job may take here, and how much it needs at the least: what does not fit is not started."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import psutil
from torch import nn

from distcore.config import RunConfig
from distcore.distributed.devices import total_memory
from distcore.engine.optim import optimizer_factory
from distcore.engine.resolve import build_strategy
from distcore.errors import DistcoreError
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


def process_limits() -> Iterator[int]:
    """Yield the bytes that each process may take by ``ulimit``: of data (-d), of addresses (-v)."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield soft


def machine_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the bytes that all processes share: the machine's, and those of the cgroups above this process.

    ``root`` stands for the file system.
    """
    yield int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError):  # not Linux, or not mounted
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        for group in (Path(own), *Path(own).parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is none
                yield int((root / "sys/fs/cgroup" / group / "memory.max").read_text())
        with contextlib.suppress(OSError, ValueError):
            yield int((root / "sys/fs/cgroup/memory/memory.limit_in_bytes").read_text())
