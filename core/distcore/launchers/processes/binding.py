"""Bind each rank to cores of its own, by the system's topology: memory nodes, sockets, and
threads of one core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from distcore.errors import ConfigError

BIND_VARIABLE = "DISTCORE_BIND_CORES"
"""Environment variable with the cores to share out: ``all`` by
``--bind-cores``, or those of ``--bind-core-list``.
"""
SYSTEM = Path("/sys/devices/system")


def bind_cores(local_rank: int, local_size: int) -> None:
    """Keep this process to its share of the cores, if ``--bind-cores`` was given
    and the system can.

    Of fewer cores than ranks nobody can have one of its own: then nothing changes, and of a
    list it is a ConfigError.
    """
    if not (wanted := os.environ.get(BIND_VARIABLE)) or not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    if wanted != "all" and len(cores := cores & {*parse_cpus(wanted)}) < local_size:
        raise ConfigError(
            f"--bind-core-list {wanted}: has {len(cores)} cores of this machine for {local_size}"
            " ranks"
        )
    if own := share(in_order(cores), local_rank, local_size):
        os.sched_setaffinity(0, own)


def share(cpus: Sequence[int], local_rank: int, local_size: int) -> tuple[int, ...]:
    """Return the part of ``cpus`` that one rank of ``local_size`` gets: all
    parts are equally long.
    """
    each = len(cpus) // local_size
    return tuple(cpus[local_rank * each : (local_rank + 1) * each])


def in_order(cpus: set[int], system: Path = SYSTEM) -> list[int]:
    """Sort ``cpus`` by memory node, socket and core, then by number, so
    that neighbors belong together.

    ``system`` is Linux's folder about CPUs. CPUs without an entry count as one group.
    """
    nodes: dict[int, int] = {}
    for folder in system.glob("node/node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            listed = parse_cpus((folder / "cpulist").read_text())
            nodes |= dict.fromkeys(listed, int(folder.name.removeprefix("node")))

    def neighbors_together(cpu: int) -> tuple[int, ...]:
        return nodes.get(cpu, 0), *_place(cpu, system), cpu

    return sorted(cpus, key=neighbors_together)


def parse_cpus(text: str) -> list[int]:
    """Return the numbers of Linux's list of CPUs: ``0-2,8`` for 0, 1, 2
    and 8. Raises ValueError.
    """
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _place(cpu: int, system: Path) -> tuple[int, int]:
    """Return socket and core of a CPU; without an entry it counts as a core of its own."""
    folder = system / f"cpu/cpu{cpu}/topology"
    try:
        socket = int((folder / "physical_package_id").read_text())
        core = int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu
    return socket, core
