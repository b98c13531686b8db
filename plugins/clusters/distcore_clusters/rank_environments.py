"""Recognize the ranks of SLURM and MPI by their environment variables.

It imports no torch, since every command calls it.

Inside an ``srun`` step, the variables of an inner torchrun or mpirun take precedence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from zlib import crc32

from distcore import ConfigError, RankInfo

LOOPBACK = "127.0.0.1"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Smallest number of SLURM's batch, interactive and external steps. They have no ranks."""
MPI_RANKS = (
    # Rank, size, local rank, local size.
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
)
MPI_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
"""Variables that identify an MPI job, the same on all its ranks."""


def slurm(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of an ``srun`` step with several tasks.

    Returns ``None`` in a batch script or a step of one task. Raises ConfigError for a variable that
    is missing or malformed.
    """
    step = _number(environ, "SLURM_STEP_ID", FIRST_SPECIAL_STEP)
    if step >= FIRST_SPECIAL_STEP or _has_rank(environ) or _mpi_names(environ):
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    if size < 2:
        return None
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    local_size = _slurm_local_size(environ)
    job = f"{environ.get('SLURM_JOB_ID')}.{step}"
    first = LOOPBACK if local_size == size else first_host(hosts)
    return RankInfo(
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=local_size,
        launcher="slurm",
        master_addr=environ.get("MASTER_ADDR") or first,
        master_port=_number(environ, "MASTER_PORT", _port_of(job)),
    )


def mpi(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of ``mpirun``: Open MPI, MVAPICH, and Hydra (MPICH, Intel MPI).

    Raises ConfigError for several machines without MASTER_ADDR: MPI's variables do not
    name the first one.
    """
    names = _mpi_names(environ)
    if _has_rank(environ) or names is None:
        return None
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    if size > local_size and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"mpirun started {size} ranks, {local_size} on this machine, and MASTER_ADDR is not"
            " set: export the address of rank 0's machine to all ranks (mpirun -x"
            " MASTER_ADDR=HOST, or -genv MASTER_ADDR HOST)"
        )
    # Hydra sets no job identifier, but one process per machine starts all its ranks there.
    without_identifier = f"parent {os.getppid()}" if size == local_size else "several machines"
    identifiers = [environ[name] for name in MPI_JOB_IDS if environ.get(name)]
    port = _port_of(identifiers[0] if identifiers else without_identifier)
    return RankInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        launcher="mpi",
        master_addr=environ.get("MASTER_ADDR") or LOOPBACK,
        master_port=_number(environ, "MASTER_PORT", port),
    )


def _has_rank(environ: Mapping[str, str]) -> bool:
    """Return True for a rank of torchrun or of a launcher with its variables."""
    return bool(environ.get("RANK") and environ.get("WORLD_SIZE"))


def _mpi_names(environ: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """Return the first row of MPI_RANKS whose variables are all set.

    All, because ``srun --mpi=pmi2`` sets PMI_RANK, too, but no local rank.
    """
    for names in MPI_RANKS:
        if all(environ.get(name) for name in names):
            return names
    return None


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this machine."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not counts:
        return _number(environ, "SLURM_NTASKS_PER_NODE", 1)
    try:
        return expand_counts(counts)[_number(environ, "SLURM_NODEID", 0)]
    except (ValueError, IndexError):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={counts!r}: expected counts such as 2(x3),1 for each of the"
            f" step's nodes, and this is node {environ.get('SLURM_NODEID', 0)}"
        ) from None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the number in a variable; raises ConfigError if it is none, or if there is none."""
    text = "" if default is None else str(default)
    value = str(environ.get(name) or text).strip()
    if not value:
        raise ConfigError(
            f"{name} is not set, though the launcher's other variables are: start the ranks again"
        )
    if not value.isdigit():
        raise ConfigError(
            f"{name}={value!r} in the environment: expected a whole number, 0 or more"
        )
    return int(value)


def _port_of(job: str) -> int:
    """Return a port that depends on ``job`` only, so that all its ranks agree.

    It is below the ephemeral port range.
    """
    return 10_000 + crc32(job.encode()) % 20_000


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list: ``node01`` for ``node[01-04,7],other``."""
    # Up to the first comma outside brackets.
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if head is None:
        return ""
    # The first number in each pair of brackets, with leading zeros.
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head.group())


def expand_counts(counts: str) -> list[int]:
    """Return one count per node: ``[2, 2, 2, 1]`` for ``2(x3),1``.

    Raises ValueError if ``counts`` is malformed.
    """
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{counts!r} is not a list of counts")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded
