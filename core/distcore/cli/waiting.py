"""How the threads of this program wait for each other: asleep, where other
programs need the cores.
"""

from __future__ import annotations

import os

BUSY = 0.5
"""Cores in use by other programs from which waiting threads sleep."""
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables by which a user has chosen; OpenMP reads them once,
when torch is imported.
"""


def sleep_if_busy() -> None:
    """Have OpenMP's threads sleep while they wait, if other programs are at work on the
    cores of this process.

    A thread that spins may hold the very core on which the one that it waits for could go on.
    On idle cores spinning is the faster way, so nothing is changed there. Numbers do not depend on
    it. To be called before torch is imported.
    Ranks of another launcher are left alone: the busy processes there are the other ranks.
    """
    from distcore.rank_environment import join

    is_chosen = any(name in os.environ for name in CHOSEN)
    if is_chosen or os.environ.get("OMP_NUM_THREADS") == "1":
        return
    if join(os.environ) is None and cores_in_use() >= BUSY:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def cores_in_use() -> float:
    """Return how many of the cores that this process may use are at work, while it watches
    them and does nothing.
    """
    import psutil

    used = psutil.cpu_percent(0.1, percpu=True)  # seconds
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(used))
    return sum(used[core] for core in own if core < len(used)) / 100
