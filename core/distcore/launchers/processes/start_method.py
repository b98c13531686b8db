"""How rank processes start on this machine, by fork or by spawn, and how they
end with their parent.
"""

from __future__ import annotations

import ctypes
import os
import pickletools
import signal
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Literal

from distcore.errors import ConfigError
from distcore.launchers.contract import AGENT_VARIABLE

PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: the signal that a process gets when its parent dies."""


def start_method() -> Literal["fork", "spawn"]:
    """Return ``fork`` where that is safe: ranks import nothing again, and ``fn``
    need not be importable.

    It is not after this process has used an accelerator. On macOS some system libraries crash after
    a fork; Windows has none.
    """
    from distcore.distributed.devices import why_not_fork  # here, because it imports torch

    return "fork" if sys.platform == "linux" and why_not_fork() is None else "spawn"


def check_spawnable(entry: Callable[[], object]) -> None:
    """Raise ConfigError if a spawned process cannot import ``entry``, the function to run.

    A function from a notebook or a prompt, a lambda and an inner function cannot be imported.
    """
    from distcore.distributed.devices import why_not_fork

    why = (why_not_fork() if sys.platform == "linux" else None) or "this system cannot fork them"
    try:
        names = {
            argument for _, argument, _ in pickletools.genops(bytes(ForkingPickler.dumps(entry)))
        }
    except Exception as error:
        # pickle raises what an object's own methods raise, and three classes of its own
        raise ConfigError(
            f"ranks are spawned, because {why}, and what they run cannot be given to them: {error};"
            " define it at the top of a file"
        ) from None
    if "__main__" in names and not hasattr(sys.modules["__main__"], "__file__"):
        raise ConfigError(
            f"ranks are spawned, because {why}, and cannot import what a notebook or a prompt"
            " defines; move it to a file and import it"
        )


def die_with(parent: int) -> None:
    """Have Linux kill this process once its parent is dead; end it at once if that
    is no longer ``parent``.

    ``parent`` is a process id. Other systems offer nothing like it: there nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl was called
            os._exit(1)


def die_with_agent() -> None:
    """Die with the agent that AGENT_VARIABLE names, if it is set; it is removed, as
    children have another parent.
    """
    if agent := os.environ.pop(AGENT_VARIABLE, ""):
        die_with(int(agent))
