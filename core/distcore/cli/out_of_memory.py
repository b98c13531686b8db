"""Append the memory plan's advice to out-of-memory errors."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distcore.errors import DistcoreError, RankError

if TYPE_CHECKING:
    from distcore.config import RunConfig
    from distcore.launchers.processes.failures import Failure

MESSAGE = re.compile(
    r"DefaultCPUAllocator: .*(can't|not enough) .*memory|OutOfMemoryError|\bout of memory\b|MemoryError"
)
"""How torch's allocators and Python say that there is none left."""
UNPLANNED = "fewer tokens in a micro-batch need less, --micro-batch-tokens"
"""The advice of a core without the command that plans."""


@contextmanager
def explain_out_of_memory(
    file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]
) -> Iterator[None]:
    """Raise RankError, one line, if what runs inside dies for want of memory: what it needs, and what to try next."""
    try:
        yield
        return
    except RankError as error:
        if not MESSAGE.search(str(error)):
            raise
        line = str(error)
    gc.collect()  # with the error its frames are gone, and what they held
    raise RankError(f"{line}; {_advice(file, changes, read_config)}")


def explainer_in_a_rank(file: str | None, changes: Mapping[str, Any]) -> Callable[[Failure], str]:
    """Return the function that says how the error line of a rank ends that another launcher started."""
    from distcore.launchers.processes.failures import oom_kills
    from distcore.rank_environment import join

    before = oom_kills()

    def explain(failure: Failure) -> str:
        if failure.kind == "lost" and oom_kills() > before:  # its launcher is ending this rank, too: no time for a plan
            return (
                "; the kernel has ended a process of this machine for want of memory: distcore plan says what the job "
                "needs, distcore tune --fit-only finds a setting that fits"
            )
        if failure.raised is None and MESSAGE.search(failure.cause):
            plan, rank_info = _plan_command(), join(os.environ)
            said = plan.advice_in_a_rank(file, changes, rank_info.size if rank_info else 1) if plan else UNPLANNED
            return f"; {said}" if said else ""
        return ""

    return explain


def _advice(file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]) -> str:
    from distcore.resolve.resolve import resolve

    config, plan = resolve(read_config()).config, _plan_command()
    said: str = plan.advice(file, changes, config) if plan else UNPLANNED
    return said


def _plan_command() -> Any:
    """Return the module of the command that plans; ``None`` if its distribution is not installed."""
    from distcore.cli.commands import command_module

    try:
        return command_module("plan")
    except DistcoreError:
        return None
