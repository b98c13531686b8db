"""Recognize the ranks of another launcher by its environment variables.

A plugin is a function of the environment. It returns this process's RankInfo, or ``None`` if its launcher did not start
the process. At most one of the three here answers: inside an ``srun`` step, the variables of an inner torchrun or
mpirun take precedence.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from zlib import crc32

from distcore import registry
from distcore.errors import ConfigError, StrategyError
from distcore.plugin.strategy.contract import LOOPBACK, RankInfo

log = logging.getLogger("distcore")
LAUNCHER_VARIABLE = "DISTCORE_LAUNCHER"
"""Environment variable with the launcher's name, set by distcore's own launcher and by ``export``.

Its other variables are the same as torchrun's.
"""
LAUNCHER_FLAGS_VARIABLE = "DISTCORE_LAUNCHER_FLAGS"
"""Environment variable with the flags by which a launcher started this rank, as a shell takes them."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Smallest number of SLURM's batch, interactive and external steps. They have no ranks."""
MPI_RANKS = (
    # Rank, size, local rank, local size.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
)
PET = ("PET_NNODES", "PET_NPROC_PER_NODE")
"""Defaults of torchrun's flags, as Kubernetes operators set them."""
MPI_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
"""Variables that identify an MPI job, the same on all its ranks."""


def join(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return which rank this process is, or ``None`` if no launcher started it.

    Asks every installed launcher plugin. Raises ConfigError, one line, for variables that contradict each other.
    """
    for name in registry.entries("rank_environments"):
        try:
            launcher = registry.load("rank_environments", name)
        except StrategyError as error:  # a broken plugin must not stop the others
            log.warning("%s", error)
            continue
        rank_info: RankInfo | None = launcher(environ)
        if rank_info is not None:
            return _checked(rank_info)
    return None


def export(rank_info: RankInfo, master_addr: str | None = None, master_port: int | None = None) -> None:
    """Write ``rank_info`` to ``os.environ`` for backends: RANK, WORLD_SIZE and so on.

    A later ``join`` returns the same ranks. MASTER_ADDR and MASTER_PORT come from the arguments or from ``rank_info``.
    For a single rank they default to this machine and a free port.
    """
    os.environ.update(
        RANK=str(rank_info.rank),
        WORLD_SIZE=str(rank_info.size),
        LOCAL_RANK=str(rank_info.local_rank),
        LOCAL_WORLD_SIZE=str(rank_info.local_size),
        MASTER_ADDR=master_addr or rank_info.master_addr or LOOPBACK,
        MASTER_PORT=str(master_port or rank_info.master_port or _free_port()),
        **{LAUNCHER_VARIABLE: rank_info.launcher},
    )


def torchrun(environ: Mapping[str, str]) -> RankInfo | None:
    """Read RANK, WORLD_SIZE and MASTER_*, as torchrun, distcore and most Kubernetes operators set them.

    Without LOCAL_RANK there is one rank per machine or pod. Raises ConfigError for several ranks without MASTER_ADDR,
    and for variables that an operator has set for torchrun where torchrun has not started this process.
    """
    _refuse_without_torchrun(environ)
    if not _has_rank(environ):
        return None
    size = _number(environ, "WORLD_SIZE")
    if size > 1 and not environ.get("MASTER_ADDR"):
        raise ConfigError(f"WORLD_SIZE={size} but MASTER_ADDR is not set: export it, the address of rank 0's machine")
    local_size = size if "LOCAL_RANK" in environ else 1
    return RankInfo(
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_size=_number(environ, "LOCAL_WORLD_SIZE", local_size),
        launcher=environ.get(LAUNCHER_VARIABLE, "torchrun"),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_number(environ, "MASTER_PORT", 0) or None,
    )


def _refuse_without_torchrun(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where each pod would train the whole job alone, or take the pod's number for a rank."""
    several = [name for name in PET if environ.get(name, "1") != "1"]
    if several and "LOCAL_RANK" not in environ:
        name = several[0]
        raise ConfigError(
            f"{name}={environ[name]} is for torchrun, which has not started this process: make the container's command "
            "torchrun --no-python distcore train …"
        )


def slurm(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of an ``srun`` step with several tasks; ``None`` in a batch script or a step of one task.

    Raises ConfigError for a variable that is missing or malformed.
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
    return RankInfo(
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=local_size,
        launcher="slurm",
        master_addr=environ.get("MASTER_ADDR") or (LOOPBACK if local_size == size else first_host(hosts)),
        master_port=_number(environ, "MASTER_PORT", _port_of(job)),
    )


def mpi(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of ``mpirun``: Open MPI, MVAPICH, and Hydra (MPICH, Intel MPI).

    Raises ConfigError for several machines without MASTER_ADDR: MPI's variables do not name the first one.
    """
    names = _mpi_names(environ)
    if _has_rank(environ) or names is None:
        return None
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    if size > local_size and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"mpirun started {size} ranks, {local_size} on this machine, and MASTER_ADDR is not set: export the "
            "address of rank 0's machine to all ranks (mpirun -x MASTER_ADDR=HOST, or -genv MASTER_ADDR HOST)"
        )
    # Hydra sets no job identifier, but one process per machine starts all its ranks there.
    alone = f"parent {os.getppid()}" if size == local_size else "several machines"
    port = _port_of(next((environ[name] for name in MPI_JOB_IDS if environ.get(name)), alone))
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
    return bool(environ.get("RANK") and environ.get("WORLD_SIZE"))


def _mpi_names(environ: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """Return the first row of MPI_RANKS whose variables are all set.

    All, because ``srun --mpi=pmi2`` sets PMI_RANK, too, but no local rank.
    """
    return next((names for names in MPI_RANKS if all(environ.get(name) for name in names)), None)


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not counts:
        return _number(environ, "SLURM_NTASKS_PER_NODE", 1)
    try:
        return expand_counts(counts)[_number(environ, "SLURM_NODEID", 0)]
    except (ValueError, IndexError):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={counts!r}: expected counts such as 2(x3),1 for each of the step's nodes, "
            f"and this is node {environ.get('SLURM_NODEID', 0)}"
        ) from None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if not value:
        if default is None:
            raise ConfigError(f"{name} is not set, though the launcher's other variables are: start the ranks again")
        return default
    if not value.strip().isdigit():
        raise ConfigError(f"{name}={value!r} in the environment: expected a whole number, 0 or more")
    return int(value)


def _checked(rank_info: RankInfo) -> RankInfo:
    """Raise ConfigError for impossible ranks: they would hang in the first collective, or use a missing GPU."""
    if rank_info.size < 1 or rank_info.rank >= rank_info.size:
        impossible = f"rank {rank_info.rank} of {rank_info.size}"
        raise ConfigError(f"{rank_info.launcher}: {impossible}: ranks count from 0 to size - 1")
    local_size = min(rank_info.local_size, rank_info.size)
    if rank_info.local_rank >= local_size:
        raise ConfigError(f"{rank_info.launcher}: local rank {rank_info.local_rank} of {local_size} on this machine")
    return replace(rank_info, local_size=local_size)


def _port_of(job: str) -> int:
    """Return a port that depends on ``job`` only, so that all its ranks agree; below the ephemeral port range."""
    return 10_000 + crc32(job.encode()) % 20_000


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list: ``node01`` for ``node[01-04,7],other``."""
    brackets = re.compile(r"\[(\w+)[^\]]*\]")  # the first number in each pair of brackets, with leading zeros
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)  # up to the first comma outside brackets
    return brackets.sub(r"\1", head.group()) if head else ""


def expand_counts(counts: str) -> list[int]:
    """Return one count per node: ``[2, 2, 2, 1]`` for ``2(x3),1``. Raises ValueError if ``counts`` is malformed."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{counts!r} is not a list of counts")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded
