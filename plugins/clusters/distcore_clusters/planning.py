"""Common parts of the plans: machines, their number, the port where ranks meet, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

from distcore import ConfigError
from distcore.launchers import Command, Host, LaunchSpec, gpus_of, rank_variables, train_command

CPP_LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
AGENT = "distcore_clusters.agent"
"""The module that runs torchelastic's agent."""
LIFELINE = "--lifeline"
"""The agent's flag, its first: end when stdin ends."""


def variables_elsewhere(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of every rank on another machine, some of the caller's among them."""
    return {**spec.here.environment, **rank_variables(spec)}


def need_nproc(name: str, spec: LaunchSpec) -> int:
    """Return the ranks per machine; raises ConfigError without ``--nproc``.

    The accelerators of other machines cannot be counted from here.
    """
    if spec.nproc is None:
        raise ConfigError(f"--launcher {name}: say how many ranks each machine gets: --nproc N")
    return spec.nproc


def check_restarts(spec: LaunchSpec, nproc: int) -> None:
    """Raise ConfigError for restarts that could not continue the run.

    They need a run folder, and a batch that every possible number of ranks can share. ``nproc`` is
    the number of ranks per machine.
    """
    least, most = spec.nodes or (1, 1)
    if least == most and not spec.max_restarts:
        return
    flag = f"--nodes {least}:{most}" if least != most else f"--max-restarts {spec.max_restarts}"
    if not spec.out or spec.resume != "auto":
        raise ConfigError(
            f"{flag} starts ranks again, which go on in their run folder: add --out DIR --resume"
            " auto"
        )
    for nodes in range(least, most + 1):
        if spec.global_batch_size % (nodes * nproc):
            numbers_of_ranks = [str(count * nproc) for count in range(least, most + 1)]
            raise ConfigError(
                f"{flag}: global_batch_size = {spec.global_batch_size} cannot be shared by {nodes}"
                f" * {nproc} ranks; choose a number that"
                f" {' and '.join(numbers_of_ranks)} divide"
            )


def limited(
    hosts: tuple[Host, ...], nproc: int | None, nodes: tuple[int, int] | None
) -> tuple[Host, ...]:
    """Return the first ``nodes`` of ``hosts`` with ``nproc`` ranks each.

    Raises ConfigError if there are too few machines or slots.
    """
    if nodes is not None:
        _, most = nodes
        if most > len(hosts):
            names = ", ".join(host.name for host in hosts)
            raise ConfigError(f"--nodes {most}: there are {len(hosts)} machines: {names}")
        hosts = hosts[:most]
    if nproc is None:
        return hosts
    with_nproc = []
    for host in hosts:
        if host.slots < nproc:
            raise ConfigError(f"--nproc {nproc}: {host.name} has {host.slots} slot(s)")
        chosen = host.chosen and host.chosen[:nproc]
        with_nproc.append(replace(host, slots=nproc, chosen=chosen))
    return tuple(with_nproc)


def port_of(spec: LaunchSpec) -> int:
    """Return a TCP port that depends on the job, below the ports that systems give out."""
    return 10_000 + crc32(spec.here.job.encode()) % 20_000


def fixed_nodes(name: str, spec: LaunchSpec) -> int | None:
    """Return the number of machines, ``None`` without one; raises ConfigError for a range."""
    if spec.nodes and spec.nodes[0] != spec.nodes[1]:
        least, most = spec.nodes
        raise ConfigError(
            f"--nodes {least}:{most}: --launcher {name} starts a fixed number; --launcher torchrun"
            f" can go from {least} to {most}"
        )
    return spec.nodes[1] if spec.nodes else None


def refuse_slots(name: str, spec: LaunchSpec) -> None:
    """Raise ConfigError if GPUs were chosen, for an engine that cannot choose GPUs."""
    has_chosen = any(host.chosen is not None for host in spec.hosts or ())
    names_slots = ":" in f"{spec.include}{spec.exclude}"
    if has_chosen or names_slots:
        raise ConfigError(
            f"--launcher {name} cannot choose GPUs: name whole machines in --include and --exclude"
        )


def need_out(name: str, spec: LaunchSpec, why: str) -> None:
    """Raise ConfigError without ``--out``: each attempt would begin in a folder of its own."""
    if not spec.out:
        raise ConfigError(f"--launcher {name}: {why}: add --out DIR")


def agent_command(
    spec: LaunchSpec, flags: Sequence[str], host: Host | None = None, elsewhere: bool = False
) -> Command:
    """Return the command of torchelastic's agent, which starts the ranks of one machine.

    ``flags`` are torchrun's; ``host`` has the chosen GPUs. With ``elsewhere`` the agent gets the
    variables for another machine, and ends, after a checkpoint of its ranks, when its stdin ends:
    with the connection that started it.
    """
    lifeline: tuple[str, ...] = ()
    variables = rank_variables(spec)
    if elsewhere:
        lifeline = (LIFELINE,)
        variables = variables_elsewhere(spec)
    # Without the interpreter and its -m, which the agent adds.
    module_and_flags = train_command(spec)[2:]
    agent = (spec.here.python, "-m", AGENT)
    words = (*agent, *lifeline, *flags, "--module", *module_and_flags)
    environment = {**quiet_agent(spec), **variables, **gpus_of(host)}
    return Command(words=words, environment=environment)


def quiet_agent(spec: LaunchSpec) -> dict[str, str]:
    """Return the variable that keeps an agent from showing warnings of torch's C++ code.

    They have stack traces. A value that the caller has set stays.
    """
    return {CPP_LOG_VARIABLE: spec.here.environment.get(CPP_LOG_VARIABLE, "ERROR")}
