"""Ranks that die with what started them: an orphan would train on, and write to the run of those that replace it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

AGENT_VARIABLE = "DISTCORE_AGENT"
"""Environment variable with the process id of the agent that started this rank, by ``distcore.launchers.agent``."""
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: the signal that a process gets when its parent dies."""


def die_with(parent: int) -> None:
    """Have Linux kill this process once its parent is dead; end it at once if that is no longer ``parent``.

    ``parent`` is a process id. Other systems offer nothing like it: there nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl was called
            os._exit(1)


def die_with_agent() -> None:
    """Die with the agent that AGENT_VARIABLE names, if it is set; it is removed, as children have another parent."""
    if agent := os.environ.pop(AGENT_VARIABLE, ""):
        die_with(int(agent))
