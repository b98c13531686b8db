"""Common parts of launchers' plans: the command of a rank, its variables, ports, and refusals."""

from __future__ import annotations

from collections.abc import Mapping

from distcore.errors import ConfigError
from distcore.launchers.contract import Host, LaunchSpec
from distcore.launchers.processes.binding import BIND_VARIABLE
from distcore.launchers.processes.log_files import LOG_DIR_VARIABLE

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


def train_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command of a rank that the launcher's engine starts: Python, ``-m``, ``distcore``, its arguments."""
    # Not --nproc: torchrun would take it for an abbreviation of two flags of its own.
    restarts = ("--set", "max_restarts=0") if spec.max_restarts else ()  # they are the engine's business
    return (spec.here.python, "-m", "distcore", "train", *spec.train, "--set", "nproc=auto", *restarts)


def rank_variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of every rank, in addition to the caller's."""
    logs = {LOG_DIR_VARIABLE: spec.log_dir} if spec.log_dir else {}
    cores = {BIND_VARIABLE: "1"} if spec.bind_cores else {}
    return {**spec.environment, **logs, **cores}


def variables_elsewhere(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables that every rank on another machine gets, some of the caller's among them."""
    return {**spec.here.environment, **rank_variables(spec)}


def gpus_of(host: Host | None) -> dict[str, str]:
    """Return the variable for the chosen GPUs of ``host``, in their order."""
    if host is None or host.chosen is None:
        return {}
    return {GPUS_VARIABLE: ",".join(map(str, host.chosen))}


def only_host(name: str, spec: LaunchSpec) -> Host | None:
    """Return the machine of a launcher that starts ranks here; raises ConfigError for several."""
    if spec.hosts and len(spec.hosts) > 1:
        names = ", ".join(host.name for host in spec.hosts)
        raise ConfigError(f"--launcher {name} starts ranks here, not on {names}; --launcher ssh starts them there")
    return spec.hosts[0] if spec.hosts else None


def refuse(name: str, given: Mapping[str, object], instead: str) -> None:
    """Raise ConfigError for the first flag in ``given`` with a value; ``instead`` is the remedy."""
    for flag, value in given.items():
        if value:
            raise ConfigError(f"--launcher {name} takes no {flag}: {instead}")


def need_nproc(name: str, spec: LaunchSpec) -> int:
    """Return the ranks per machine; raises ConfigError where they were not given, as they are not counted from here."""
    if spec.nproc is None:
        raise ConfigError(f"--launcher {name}: say how many ranks each machine gets: --nproc N")
    return spec.nproc


def check_restarts(spec: LaunchSpec, nproc: int) -> None:
    """Raise ConfigError for restarts that could not go on: without a run folder, or with an odd number of ranks.

    ``nproc`` is the number of ranks per machine.
    """
    least, most = spec.nodes or (1, 1)
    if least == most and not spec.max_restarts:
        return
    what = f"--nodes {least}:{most}" if least != most else f"--max-restarts {spec.max_restarts}"
    if not spec.out or spec.resume != "auto":
        raise ConfigError(f"{what} starts ranks again, which go on in their run folder: add --out DIR --resume auto")
    for nodes in range(least, most + 1):
        if spec.global_batch_size % (nodes * nproc):
            raise ConfigError(
                f"{what}: global_batch_size = {spec.global_batch_size} cannot be shared by {nodes} * {nproc} ranks; "
                f"choose a number that {' and '.join(str(n * nproc) for n in range(least, most + 1))} divide"
            )
