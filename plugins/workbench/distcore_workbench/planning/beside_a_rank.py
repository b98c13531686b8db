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
    environment = {}
    for name, value in os.environ.items():
        # With these, the process would wait for ranks.
        if not OF_RANKS.match(name):
            environment[name] = value
    try:
        job = json.dumps({"file": file, "changes": dict(changes), "ranks": ranks})
        run = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM],
            input=job,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()


def answer() -> None:
    """Print the advice for the job that stdin names."""
    job = json.loads(sys.stdin.read())
    file = job["file"]
    changes = job["changes"] | {"nproc": job["ranks"]}
    try:
        config = resolve(load_config(file, changes)).config
        ranks = [int(config.nproc)]
        request = PlanRequest(config=file, changes=changes, strategies="", ranks=ranks)
        print(advice(request, config))
    except DistcoreError as error:
        sys.exit(str(error))
