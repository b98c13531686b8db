"""``--launcher mpi[:openmpi|mpich]``: mpirun starts the ranks, which then talk
over gloo or nccl.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping

from distcore import ConfigError, nearest
from distcore.launchers import (
    Command,
    Host,
    LaunchPlan,
    LaunchSpec,
    check_programs,
    refuse,
    run_command,
    train_command,
)
from distcore_clusters.planning import (
    fixed_nodes,
    limited,
    need_nproc,
    port_of,
    refuse_slots,
    variables_elsewhere,
)

KINDS = ("openmpi", "mpich")
OPEN_MPI, HYDRA = "mpirun", "mpiexec.hydra"
"""Programs of Open MPI, and of MPICH and Intel MPI. No other MPI has a program
of the second name.
"""
LOOPBACK = "127.0.0.1"
"""Address of rank 0 where all ranks are on this machine."""


class MpiLauncher:
    """Starts ranks by mpirun; they meet at an address and a port of the job's own."""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the command line of Open MPI or of MPICH, Hydra's; raises ConfigError
        for machines without names.
        """
        kind = spec.value or KINDS[0]
        if kind not in KINDS:
            kinds = " or ".join(KINDS)
            raise ConfigError(f"--launcher mpi:{kind}: expected {kinds}{nearest(kind, KINDS)}")
        refuse("mpi", {"--max-restarts": spec.max_restarts}, "start it again with --resume auto")
        refuse_slots("mpi", spec)
        if (fixed_nodes("mpi", spec) or 1) > 1 and spec.hosts is None:
            raise ConfigError(
                f"--launcher mpi --nodes {spec.nodes[1]}: name the machines: --hostfile FILE"  # type: ignore[index]
            )
        hosts = None if spec.hosts is None else limited(spec.hosts, spec.nproc, spec.nodes)
        address = hosts[0].name if hosts else LOOPBACK
        variables = {
            **variables_elsewhere(spec),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port_of(spec)),
        }
        ranks = sum(host.slots for host in hosts) if hosts else need_nproc("mpi", spec)
        line = _open_mpi if kind == "openmpi" else _hydra
        words = (*line(hosts or (), ranks, variables), *train_command(spec))
        return LaunchPlan(commands=(Command(words=words),), patience=spec.timeout)

    def run(self, plan: LaunchPlan) -> int:
        """Become mpirun; raises ConfigError where that is another MPI's."""
        check_programs(plan)
        if plan.commands[0].words[0] == OPEN_MPI and "Open MPI" not in _version():
            raise ConfigError(
                f"--launcher mpi: {OPEN_MPI} on PATH is not Open MPI's; for MPICH or Intel MPI:"
                " --launcher mpi:mpich"
            )
        return run_command(plan)


def _version() -> str:
    return subprocess.run(
        [OPEN_MPI, "--version"], capture_output=True, text=True, check=False
    ).stdout


def _open_mpi(hosts: tuple[Host, ...], ranks: int, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of Open MPI's mpirun, before the program."""
    # Open MPI would bind each rank to one core, and torch computes with several threads.
    yield from (OPEN_MPI, "-np", str(ranks), "--bind-to", "none")
    if hosts:
        yield from ("--host", _host_list(hosts))
    for name, value in variables.items():
        yield from ("-x", f"{name}={value}")


def _hydra(hosts: tuple[Host, ...], ranks: int, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of the mpiexec of MPICH and Intel MPI, before the program."""
    yield from (HYDRA, "-n", str(ranks), "-bind-to", "none")
    if hosts:
        yield from ("-hosts", _host_list(hosts))
    for name, value in variables.items():
        yield from ("-genv", name, value)


def _host_list(hosts: tuple[Host, ...]) -> str:
    """Return ``HOST:SLOTS,HOST:SLOTS``, which both take."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)
