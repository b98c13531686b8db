"""How ranks come to life, on one machine or on many, through an engine that exists.

A launcher is an entry point of the group ``distcore.launchers``: a class that takes no arguments,
with the methods of ``Launcher``. ``distcore train --launcher NAME`` builds a ``LaunchSpec``, has
the launcher plan, and prints the plan (``--dry-run``) or has the launcher run it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from distcore.errors import print_uncaught_on_one_line
from distcore.launchers.contract import (
    AGENT_VARIABLE,
    Command,
    Here,
    Host,
    Launcher,
    LaunchPlan,
    LaunchSpec,
)
from distcore.launchers.planning import (
    check_programs,
    gpus_of,
    only_host,
    rank_variables,
    refuse,
    run_command,
    train_command,
    write_files,
)
from distcore.launchers.processes.failures import Failure

__all__ = [
    "AGENT_VARIABLE",
    "Command",
    "Failure",
    "Here",
    "Host",
    "LaunchPlan",
    "LaunchSpec",
    "Launcher",
    "check_programs",
    "gpus_of",
    "launch",
    "only_host",
    "rank_variables",
    "refuse",
    "run_command",
    "train_command",
    "write_files",
]

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    *args: Any,
    nproc: int,
    errors: Path | None = None,
    timeout: float | None = None,
    grace_period: float = 0,
) -> list[T]:
    """Run ``fn(*args)`` in ``nproc`` new processes on this machine; return the
    results in rank order.

    Every rank is a new process, even if there is only one, with RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. The calling process hosts the
    ranks' store at that address, on loopback. Where ranks are forked, a script needs no
    ``__main__`` guard and ``fn`` may be defined in a notebook.

    If a rank fails, the others are ended. A DistcoreError of a rank, an error that the user can
    correct, is raised here again. Any other exception becomes a RankError. It names the rank, the
    cause, and the file with the traceback in the folder ``errors`` (default: a temporary one).

    ``timeout`` limits the whole job, in seconds. Ctrl-C ends all ranks and raises
    KeyboardInterrupt; SIGTERM ends them and raises SystemExit(143). With a ``grace_period`` SIGTERM
    and the first Ctrl-C are passed on to the ranks, as SIGTERM. The ranks have this many seconds to
    end by themselves.
    """
    from distcore.launchers.processes.local import run_ranks  # here, because it imports torch

    print_uncaught_on_one_line()
    return run_ranks(fn, args, nproc, errors, timeout, grace_period)
