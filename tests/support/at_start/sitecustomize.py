"""Imported by every Python process that a test starts: tells the test when the process starts
ranks, or is one, and has programs start warm.
"""

from __future__ import annotations

import os
import sys
import threading

SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE")


def tell(what: str) -> None:
    """Add a line to the file that the test reads."""
    with open(os.environ["DISTCORE_TEST_RANKS"], "a", encoding="utf-8") as file:
        file.write(f"{what}: {' '.join(sys.orig_argv)[:200]}\n")


def hook(event: str, _arguments: object) -> None:
    """An audit hook: ``distcore.launch`` forks its ranks from a thread of this name."""
    if event == "os.fork" and threading.current_thread().name == "distcore-launch":
        tell("started a rank")


def watch_ranks() -> None:
    """Tell of the ranks that this process is or starts, if a test asks."""
    if "DISTCORE_TEST_RANKS" in os.environ:
        sys.addaudithook(hook)
        if any(os.environ.get(name, "1") != "1" for name in SIZES):
            tell("is one of several ranks")


watch_ranks()
if "DISTCORE_TEST_WARM" in os.environ:
    from warm_start import start_warm

    start_warm()
