"""How much memory there is: of a device, of the machine, and under the limits on a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch


def available_memory(device: str) -> int:
    """Return the bytes that a process may have at most: of the device, or of main memory and
    the limits on it.

    0 where that is not known.
    """
    return total_memory(device) if device != "cpu" else min((*process_limits(), *machine_limits()))


def total_memory(device_type: str) -> int:
    """Return the memory of the first device of an accelerator type, in bytes; 0 if unknown."""
    try:
        return int(getattr(torch, device_type).get_device_properties(0).total_memory)
    except (AttributeError, AssertionError, RuntimeError):
        return 0


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
    """Yield the bytes that processes share: the machine's, and those of each cgroup around this.

    ``root`` is the root of the file system.
    """
    yield int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError):  # not Linux, or not mounted
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        # Of version 2; version 1 has a line for each resource.
        groups = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
        own_group = Path(groups[0] if groups else "")
        for group in (own_group, *own_group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is none
                yield int((root / "sys/fs/cgroup" / group / "memory.max").read_text())
        with contextlib.suppress(OSError, ValueError):
            yield int((root / "sys/fs/cgroup/memory/memory.limit_in_bytes").read_text())
