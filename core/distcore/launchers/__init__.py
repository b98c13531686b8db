"""How ranks come to life: started on this machine, or joined where another launcher has started them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from distcore.launchers.environment import export, join
from distcore.launchers.failures import one_line_errors, run_as_rank

if TYPE_CHECKING:
    from typing import Any

__all__ = ["export", "join", "launch", "one_line_errors", "run_as_rank"]

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    *args: Any,
    nproc: int,
    errors: Path | None = None,
    timeout: float | None = None,
    patience: float = 0,
) -> list[T]:
    """Run ``fn(*args)`` in ``nproc`` new processes on this machine; return what each returned, in rank order.

    Every rank, even a single one, is a process of its own, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT in its environment. The caller hosts the store at that address, on loopback: all
    ranks are its clients. By fork a script needs no ``__main__`` guard and ``fn`` may come from a notebook cell.

    When a rank fails, the others are ended. What the user can mend (a DistcoreError raised in a rank) comes back as
    it was raised; anything else is a RankError that names rank, cause and the traceback's file under ``errors``
    (default: a temporary folder). ``timeout`` bounds the whole job, in seconds. Ctrl-C ends all ranks and raises
    KeyboardInterrupt; SIGTERM ends them and raises SystemExit(143). With ``patience`` SIGTERM is passed on to the
    ranks, which have so many seconds to end by themselves.
    """
    from distcore.launchers.local import run_ranks  # imports torch

    return run_ranks(fn, args, nproc, errors, timeout, patience)
