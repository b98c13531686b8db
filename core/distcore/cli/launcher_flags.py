"""The flags of ``distcore train`` that start ranks; they are not in the config of the run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import registry
from distcore.cli.parser import Parser
from distcore.errors import ConfigError

if TYPE_CHECKING:
    from distcore.config import RunConfig
    from distcore.launchers import Here, Host, LaunchSpec

DEFAULT = "local"
FLAGS = {
    "--launcher": ("NAME[:VALUE]", "launcher that starts the ranks: {launchers}"),
    "--nodes": ("N|MIN:MAX", "machines; MIN:MAX: as many as there are, for torchrun"),
    "--hostfile": ("FILE", "the machines, a line 'NAME slots=N' for each"),
    "--include": (
        "HOST:0,2@HOST",
        "machines to use, in this order; after a colon, their slots (GPUs)",
    ),
    "--exclude": ("HOST:1@HOST", "machines, or slots of them, to leave out"),
    "--env": ("NAME=VALUE", "variable for all ranks; repeatable; over those of .distcore.env"),
    "--log-dir": ("DIR", "a file per rank with its output; rank 0 prints on the screen, too"),
    "--bind-cores": ("", "give each rank cores of its own"),
    "--bind-core-list": ("0-7,16", "the same, of these cores"),
}
"""Map each flag to its value, if any, and text in ``--help``. ``{launchers}`` stands
for the installed launchers.
"""


def add_launcher_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags in a group that the short help omits. A flag that is not
    given sets no attribute.
    """
    group = parser.add_argument_group("starting ranks, here or on other machines")
    launchers = ", ".join(registry.offers("launchers"))
    for name, (takes, text) in FLAGS.items():
        action = "append" if name == "--env" else "store"
        kind: dict[str, Any] = (
            {"metavar": takes, "action": action} if takes else {"action": "store_true"}
        )
        group.add_argument(
            name, help=text.format(launchers=launchers), default=argparse.SUPPRESS, **kind
        )
    if isinstance(parser, Parser):
        parser.short_help |= dict.fromkeys(group._group_actions)


def is_launcher_asked(arguments: argparse.Namespace) -> bool:
    """Return True if any of the flags was given."""
    return any(_dest(name) in vars(arguments) for name in FLAGS)


def start(arguments: argparse.Namespace, read_config: Callable[[], RunConfig]) -> int:
    """Start the run by a launcher, or print its commands; return the
    exit status. Raises DistcoreError.
    """
    from distcore.rank_environment import join
    from distcore.rank_environment.environment import LAUNCHER_FLAGS_VARIABLE

    name = vars(arguments).get("launcher", DEFAULT).partition(":")[0]
    launcher = registry.load("launchers", name)()
    if (rank_info := join(os.environ)) is not None:
        raise ConfigError(
            f"--launcher {name}: {rank_info.launcher} started this process as a rank; leave out one"
        )
    config = read_config()
    plan = launcher.plan(spec_of(arguments, config, arguments.argv))
    if arguments.dry_run:
        _look_at_data(config)
        print(str(plan).rstrip("\n"))
        return 0
    if config.overwrite and name != DEFAULT:
        _set_aside(config)
    sys.stdout.flush()  # the launcher may replace this process
    os.environ[LAUNCHER_FLAGS_VARIABLE] = flags_to_restart(arguments.argv, config)
    return int(launcher.run(plan))


def _set_aside(config: RunConfig) -> None:
    """Set the run in ``out`` aside, once for all ranks; raises ConfigError if that cannot be."""
    from distcore.jobs.logs import set_up_logging
    from distcore.resolve.run_folder import check_out, set_aside

    set_up_logging(config, rank=0)
    if config.out is not None:
        check_out(config)
        set_aside(config)


def _look_at_data(config: RunConfig) -> None:
    """Prepare the data that the user names, as a dry run on this
    machine does. Raises DistcoreError.
    """
    if "data" in config.task_options:
        from distcore.jobs.train import prepare_data

        prepare_data(config)


def spec_of(arguments: argparse.Namespace, config: RunConfig, argv: Sequence[str]) -> LaunchSpec:
    """Return the request to the launcher for a run, by ``distcore train``
    with ``argv``. Raises ConfigError.
    """
    from distcore.launchers import LaunchSpec
    from distcore.launchers.planning import settings

    given = vars(arguments)
    # Only the flag: in a config file nproc is the number of all ranks.
    nproc = config.nproc if "nproc" in given and isinstance(config.nproc, int) else None
    cores = given.get("bind_core_list", "all" if "bind_cores" in given else "")
    if not re.fullmatch(r"(all)?|\d+(-\d+)?(,\d+(-\d+)?)*", cores):
        raise ConfigError(
            f"--bind-core-list {cores}: expected numbers and ranges of cores, such as 0-7,16"
        )
    # A rank gets the command line without the flags that start ranks.
    _, train = _own_flags().parse_known_args(list(argv))
    folders = (Path.cwd(), Path.home())
    return LaunchSpec(
        train=tuple(train),
        value=given.get("launcher", "").partition(":")[2],
        nodes=_nodes(given["nodes"]) if "nodes" in given else None,
        nproc=nproc,
        hosts=_hosts(given, nproc),
        include=given.get("include", ""),
        exclude=given.get("exclude", ""),
        environment=settings(given.get("env", ()), folders),
        bind_cores=cores,
        log_dir=str(Path(given["log_dir"]).absolute()) if "log_dir" in given else None,
        device=config.device,
        global_batch_size=config.global_batch_size,
        max_restarts=config.max_restarts,
        timeout=config.timeout,
        out=config.out,
        resume=config.resume,
        overwrite=config.overwrite,
        here=_here(config, flags_to_restart(argv, config)),
    )


def _here(config: RunConfig, flags: str) -> Here:
    """Return what a launcher must know of this process; ``flags`` start the ranks again."""
    from distcore.launchers import Here
    from distcore.launchers.planning import forwarded
    from distcore.rank_environment.environment import LAUNCHER_FLAGS_VARIABLE

    return Here(
        folder=str(Path.cwd()),
        python=sys.executable,
        job=f"distcore-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        environment={**forwarded(os.environ), LAUNCHER_FLAGS_VARIABLE: flags},
        inside=os.environ.get("SLURM_JOB_ID"),
        out_exists=(
            config.out is not None
            and Path(config.out, "config.yaml").exists()
            and not config.overwrite
        ),
    )


def _hosts(given: dict[str, Any], nproc: int | None) -> tuple[Host, ...] | None:
    """Return the machines that the flags choose; ``None`` if none of them does."""
    if given.keys().isdisjoint(("hostfile", "include", "exclude")):
        return None
    read_hosts = registry.load("hosts", "hostfile")
    hosts: tuple[Host, ...] | None = read_hosts({"launcher": DEFAULT} | given, nproc)
    return hosts


def _nodes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of machines, from ``N`` or ``MIN:MAX``."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match:
        fewest = int(match[1])
        most = int(match[2] or match[1])
        if fewest <= most:
            return fewest, most
    raise ConfigError(f"--nodes {text}: expected a number of machines, N, or MIN:MAX")


def flags_to_restart(argv: Sequence[str], config: RunConfig) -> str:
    """Return the flags in ``argv`` that start ranks, quoted for a shell: a resumed
    run needs them again.
    """
    words = ["--max-restarts", str(config.max_restarts)] if config.max_restarts else []
    return shlex.join([*words, *flags_that_start(argv)])


def flags_that_start(argv: Sequence[str]) -> list[str]:
    """Return the flags in ``argv`` that start ranks, with their values."""
    arguments, _ = _own_flags().parse_known_args(list(argv))
    words = []
    for name in (*FLAGS, "--nproc"):
        given = vars(arguments).get(_dest(name), [])
        values = given if isinstance(given, list) else [given]
        for value in values:
            words += [name] if value is True else [name, value]
    return words


def _own_flags() -> argparse.ArgumentParser:
    """Return a parser of the flags that start ranks, which leaves all others."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_launcher_flags(own)
    own.add_argument("--nproc", default=argparse.SUPPRESS)
    own.add_argument("--dry-run", action="store_true")
    return own


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
