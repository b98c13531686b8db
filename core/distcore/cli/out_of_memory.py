"""An error for want of memory ends with what the plan would have said."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distcore.errors import DistcoreError, RankError, write_traceback

if TYPE_CHECKING:
    from distcore.config import RunConfig
    from distcore.launchers.processes.failures import Failure

MESSAGE = re.compile(
    r"DefaultCPUAllocator: .*(can't|not enough) .*memory|OutOfMemoryError|\bout of memory\b|MemoryError"
)
"""How torch's allocators and Python say that there is none left."""
OF_RANKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|PET_|SLURM_|PMI|OMPI_|MV2_|MPI_|HYDRA_|DISTCORE_LAUNCHER)"
)
"""Beginnings of the variables by which launchers tell a process that it is a rank."""
PATIENCE = 25.0
"""Seconds for the plan of a rank; launchers end ranks that live longer than 30 after another one has failed."""
ANSWER = "from distcore.cli.out_of_memory import answer; answer()"
"""The program that plans beside a rank."""


@contextmanager
def explained(file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]) -> Iterator[None]:
    """Raise RankError, one line, if what runs inside dies for want of memory: what it needs, and what to try next."""
    try:
        yield
        return
    except RankError as error:
        if not MESSAGE.search(str(error)):
            raise
        line = str(error)
    except (RuntimeError, MemoryError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        if not MESSAGE.search(cause):
            raise
        line = f"{cause} (traceback: {write_traceback(error)})"
    gc.collect()  # with the error its frames are gone, and what they held
    raise RankError(f"{line}; {_advice(file, changes, read_config)}")


def in_a_rank(file: str | None, changes: Mapping[str, Any]) -> Callable[[Failure], str]:
    """Return the function that says how the error line of a rank ends that another launcher started."""
    from distcore.launchers.processes.failures import oom_kills

    before = oom_kills()

    def explain(failure: Failure) -> str:
        if failure.kind == "lost" and oom_kills() > before:  # its launcher is ending this rank, too: no time for a plan
            return (
                "; the kernel has ended a process of this machine for want of memory: distcore plan says what the job "
                "needs, distcore tune --fit-only finds a setting that fits"
            )
        if failure.raised is None and MESSAGE.search(failure.cause):
            said = _answer(file, changes)
            return f"; {said}" if said else ""
        return ""

    return explain


def _answer(file: str | None, changes: Mapping[str, Any]) -> str:
    """Return the advice for a rank; empty if there is none in time.

    From a process of its own: this one has ranks around it, and no memory.
    """
    from distcore.rank_environment import join

    rank_info = join(os.environ)
    asked = {"file": file, "changes": dict(changes), "ranks": rank_info.size if rank_info else 1}
    environment = {name: value for name, value in os.environ.items() if not OF_RANKS.match(name)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", ANSWER], input=json.dumps(asked), env=environment, capture_output=True,
            text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def answer() -> None:
    """Print the advice for the job that stdin names; the main function of the process beside a rank."""
    from distcore.config import load_config

    asked = json.loads(sys.stdin.read())
    changes = asked["changes"] | {"nproc": asked["ranks"]}
    try:
        print(_advice(asked["file"], changes, lambda: load_config(asked["file"], changes)))
    except DistcoreError as error:
        sys.exit(str(error))


def _advice(file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]) -> str:
    from distcore.cli.commands import command_module
    from distcore.resolve.resolve import resolve

    config = resolve(read_config()).config
    try:
        plan = command_module("plan")
    except DistcoreError:  # the distribution that plans is not installed
        return "fewer tokens in a micro-batch need less, --micro-batch-tokens"
    said: str = plan.advice(file, changes, config)
    return said
