"""Whether the kernel has ended processes of this machine for want of memory."""

from __future__ import annotations

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def oom_kills() -> int | None:
    """Return how many processes this machine's kernel has ended for want of memory, of any
    cgroup; ``None`` where the kernel does not count them.
    """
    try:
        lines = VMSTAT.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return None  # an old Linux
