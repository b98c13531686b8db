"""Recognize the ranks of another launcher by its environment variables.

A plugin is a function of the environment. It returns this process's RankInfo, or ``None`` if its
launcher did not start
the process. At most one answers: inside an ``srun`` step, the variables of an inner
torchrun or mpirun take precedence.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import replace

from distcore import registry
from distcore.errors import ConfigError, StrategyError
from distcore.hints import how_to_get
from distcore.plugin.strategy.contract import LOOPBACK, RankInfo

log = logging.getLogger("distcore")
LAUNCHER_VARIABLE = "DISTCORE_LAUNCHER"
"""Environment variable with the launcher's name, set by distcore's own launcher and by ``export``.

Its other variables are the same as torchrun's.
"""
LAUNCHER_FLAGS_VARIABLE = "DISTCORE_LAUNCHER_FLAGS"
"""Environment variable with the flags by which a launcher started this rank, as
a shell takes them.
"""
PET = ("PET_NNODES", "PET_NPROC_PER_NODE")
"""Defaults of torchrun's flags, as Kubernetes operators set them."""
READ_ELSEWHERE = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "MPI_LOCALNRANKS": "mpirun",
}
"""Numbers of ranks, by the launcher that sets them; a plugin reads its other variables."""


def join(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return which rank this process is, or ``None`` if no launcher started it.

    Asks every installed launcher plugin. Raises ConfigError, one line, for variables
    that contradict each other.
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
    for name in READ_ELSEWHERE if "mpi" not in registry.entries("rank_environments") else ():
        if environ.get(name, "1") != "1":  # each rank would train the whole job
            command = how_to_get("rank_environments", "mpi")
            remedy = f"; install it with: {command}" if command else ""
            raise ConfigError(
                f"{name}={environ[name]}: no plugin reads the ranks of"
                f" {READ_ELSEWHERE[name]}{remedy}"
            )
    return None


def export(
    rank_info: RankInfo, master_addr: str | None = None, master_port: int | None = None
) -> None:
    """Write ``rank_info`` to ``os.environ`` for backends: RANK, WORLD_SIZE and so on.

    A later ``join`` returns the same ranks. MASTER_ADDR and MASTER_PORT come from the arguments or
    from ``rank_info``. For a single rank they default to this machine and a free port.
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
    """Read RANK, WORLD_SIZE and MASTER_*, as torchrun, distcore and most
    Kubernetes operators set them.

    Without LOCAL_RANK there is one rank per machine or pod. Raises ConfigError for several ranks
    without MASTER_ADDR, and for variables that an operator has set for torchrun where torchrun has
    not started this process.
    """
    _refuse_without_torchrun(environ)
    if not _has_rank(environ):
        return None
    size = _number(environ, "WORLD_SIZE")
    if size > 1 and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"WORLD_SIZE={size} but MASTER_ADDR is not set: export it, the address of rank 0's"
            " machine"
        )
    local_size = size if "LOCAL_RANK" in environ else 1
    return RankInfo(
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_size=_number(environ, "LOCAL_WORLD_SIZE", local_size),
        launcher=environ.get(LAUNCHER_VARIABLE, "torchrun"),
        master_addr=_bare(environ.get("MASTER_ADDR")),
        master_port=_number(environ, "MASTER_PORT", 0) or None,
    )


def _bare(address: str | None) -> str | None:
    """Return an address without the brackets of an IPv6 address in a URL, which
    sockets do not take.
    """
    is_in_brackets = address is not None and address.startswith("[") and address.endswith("]")
    return address[1:-1] if address is not None and is_in_brackets else address


def _refuse_without_torchrun(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if an operator has set torchrun's variables, and torchrun did not start
    this process: each machine would train alone.
    """
    several = [name for name in PET if environ.get(name, "1") != "1"]
    if several and "LOCAL_RANK" not in environ:
        name = several[0]
        raise ConfigError(
            f"{name}={environ[name]} is for torchrun, which has not started this process: make the"
            " container's command torchrun --no-python distcore train …"
        )


def _has_rank(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("RANK") and environ.get("WORLD_SIZE"))


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the number in a variable; without a ``default`` it must be set."""
    value = environ.get(name)
    if not value:
        if default is None:
            raise ConfigError(
                f"{name} is not set, though the launcher's other variables are: start the ranks"
                " again"
            )
        return default
    if not value.strip().isdigit():
        raise ConfigError(
            f"{name}={value!r} in the environment: expected a whole number, 0 or more"
        )
    return int(value)


def _checked(rank_info: RankInfo) -> RankInfo:
    """Return ``rank_info`` with no more ranks on this machine than there are; raises ConfigError
    for numbers that cannot be.
    """
    if rank_info.size < 1 or rank_info.rank >= rank_info.size:
        impossible = f"rank {rank_info.rank} of {rank_info.size}"
        raise ConfigError(f"{rank_info.launcher}: {impossible}: ranks count from 0 to size - 1")
    local_size = min(rank_info.local_size, rank_info.size)
    if rank_info.local_rank >= local_size:
        raise ConfigError(
            f"{rank_info.launcher}: local rank {rank_info.local_rank} of {local_size} on this"
            " machine"
        )
    return replace(rank_info, local_size=local_size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
