"""Advice after an out-of-memory error in a rank, planned by a process of its own: the rank has
peers and no memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from distcore import DistcoreError, load_config
from distcore.lab import resolve
from distcore_workbench.planning.out_of_memory import advice
from distcore_workbench.planning.request import PlanRequest

OF_RANKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|PET_|SLURM_|PMI|OMPI_|MV2_|MPI_|HYDRA_|DISTCORE_LAUNCHER)"
)
"""Beginnings of the variables by which launchers tell a process that it is a rank."""
PATIENCE = 25.0
"""Seconds for the plan of a rank; launchers end ranks that live longer than 30 after
another one has failed.
"""
PROGRAM = f"from {__name__} import answer; answer()"
"""The program that plans beside a rank."""


def ask(file: str | None, changes: Mapping[str, Any], ranks: int) -> str:
    """Return the advice for a job on ``ranks`` ranks; empty if there is none in time."""
    asked = {"file": file, "changes": dict(changes), "ranks": ranks}
    environment = {name: value for name, value in os.environ.items() if not OF_RANKS.match(name)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM],
            input=json.dumps(asked),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def answer() -> None:
    """Print the advice for the job that stdin names."""
    asked = json.loads(sys.stdin.read())
    changes = asked["changes"] | {"nproc": asked["ranks"]}
    try:
        config = resolve(load_config(asked["file"], changes)).config
        print(
            advice(
                PlanRequest(
                    config=asked["file"], changes=changes, strategies="", ranks=[int(config.nproc)]
                ),
                config,
            )
        )
    except DistcoreError as error:
        sys.exit(str(error))
