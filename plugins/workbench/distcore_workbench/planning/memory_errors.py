"""Append the memory plan's advice to the error line of a run that died for want of memory."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distcore import RankError
from distcore.launchers.processes import oom_kills

if TYPE_CHECKING:  # every run asks for these functions, and few fail
    from distcore import RunConfig
    from distcore.launchers import Failure

MESSAGE = re.compile(
    r"DefaultCPUAllocator: .*(can't|not enough) .*memory|OutOfMemoryError|\bout of"
    r" memory\b|MemoryError"
)
"""How torch's allocators and Python say that there is none left."""

GUESS = "(out of memory?)"
"""What the launcher adds where memory may be why a rank was killed."""
NOT_MEMORY = "the kernel ended no process for want of memory, so something else did; go on with"


@contextmanager
def explain_out_of_memory(
    file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]
) -> Iterator[None]:
    """Raise RankError, one line, if the block runs out of memory: its need, and a way out.

    ``file`` and ``changes`` are arguments of ``read_config``.
    """
    try:
        yield
        return
    except RankError as error:
        line = str(error)
        if "killed by SIGKILL" in line and GUESS not in line:
            folder = read_config().out
            again = f"--out {folder}" if folder else "the folder of this run as --out"
            raise RankError(f"{line}; {NOT_MEMORY} {again} and --resume auto") from error
        if not MESSAGE.search(line):
            raise
    # Without the error, its frames and their tensors are garbage.
    gc.collect()
    from distcore.lab import resolve
    from distcore_workbench.planning.out_of_memory import advice
    from distcore_workbench.planning.request import PlanRequest

    config = resolve(read_config()).config
    ranks = [int(config.nproc)]
    request = PlanRequest(config=file, changes=changes, strategies="", ranks=ranks)
    raise RankError(f"{line}; {advice(request, config)}")


def explainer_in_a_rank(file: str | None, changes: Mapping[str, Any]) -> Callable[[Failure], str]:
    """Return a function that explains an error of a rank that another launcher started."""
    before = oom_kills() or 0

    def explain(failure: Failure) -> str:
        # Its launcher is ending this rank, too: no time for a plan.
        if failure.kind == "lost" and (oom_kills() or 0) > before:
            return (
                "; the kernel ended a process of this machine, which was out of memory: distcore"
                " plan shows what the job needs, distcore tune --fit-only finds a setting that fits"
            )
        if failure.raised is None and MESSAGE.search(failure.cause):
            from distcore_workbench.planning import beside_a_rank

            # set under every launcher
            advice = beside_a_rank.ask(file, changes, int(os.environ.get("WORLD_SIZE", 1)))
            return f"; {advice}" if advice else ""
        return ""

    return explain
