"""The load of other programs, from which timings say little."""

from __future__ import annotations

import os

import psutil

BUSY = 0.25
"""Load of a core by other programs from which timings say little."""


def foreign_load() -> float | None:
    """Return the load average of the last minute if the machine is busy; otherwise ``None``.

    Before this program starts work, it is the load of other programs. It refers to all cores of the
    machine, also in a container with fewer cores.
    """
    load = psutil.getloadavg()[0]
    return load if load > BUSY * (os.cpu_count() or 1) else None
