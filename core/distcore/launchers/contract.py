"""The values between ``distcore train`` and a launcher: the user's request, and
the plan of commands.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

AGENT_VARIABLE = "DISTCORE_AGENT"
"""Environment variable with the process id of the agent that started this rank,
which dies with it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    """Name or address, as the hostfile has it."""
    slots: int
    """Number of ranks."""
    chosen: tuple[int, ...] | None = None
    """The slots that ``--include`` and ``--exclude`` left, in the order of ``--include``;
    ``None``: the first ones.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The machine and the process that start a run. A plan depends only on
    this and on ``LaunchSpec``.
    """

    folder: str = "."
    """The current folder, absolute; ranks start in the same one."""
    python: str = "python"
    """The interpreter, absolute."""
    job: str = "job"
    """A name that no other run has; ports are made from it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables of the caller that go to other machines, too."""
    inside: str | None = None
    """The allocation that this process runs in, such as a SLURM job id; ``None``: none."""
    out_exists: bool = False
    """True if the run folder holds a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """The user's request, after the checks that do not depend on the launcher."""

    train: tuple[str, ...] = ()
    """The arguments of ``distcore train`` for every rank: without the flags of starting."""
    value: str = ""
    """VALUE of ``--launcher NAME:VALUE``."""
    nodes: tuple[int, int] | None = None
    """Least and largest number of machines, 1 or more; ``None``: not given."""
    nproc: int | None = None
    """Ranks per machine; ``None``: not given."""
    hosts: tuple[Host, ...] | None = None
    """The machines of the hostfile that are left; ``None``: no hostfile was given."""
    include: str = ""
    """``--include`` as given."""
    exclude: str = ""
    """``--exclude`` as given."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that every rank gets: from ``.distcore.env``, then from ``--env``."""
    log_dir: str | None = None
    """Absolute folder for the ranks' log files."""
    bind_cores: str = ""
    """Cores that the ranks share out, such as ``0-7,16``, or ``all``; empty:
    ranks are not bound.
    """
    device: str = "auto"
    """``device`` of the config."""
    global_batch_size: int = 1
    """``global_batch_size`` of the config."""
    max_restarts: int = 0
    """``max_restarts`` of the config."""
    timeout: float = 600
    """``timeout`` of the config, in seconds."""
    out: str | None = None
    """``out`` of the config."""
    resume: str | None = None
    """``resume`` of the config."""
    overwrite: bool = False
    """``overwrite`` of the config; the run in ``out`` is set aside before the launcher starts."""
    here: Here = field(default_factory=Here)
    """Where the run is started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A program that a plan starts."""

    words: tuple[str, ...]
    """The program and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the caller's."""
    host: str | None = None
    """The machine that it is for, for messages; ``None``: this one."""

    def __str__(self) -> str:
        """Return the command as a shell takes it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """The commands and files of a launch; ``--dry-run`` prints them."""

    commands: tuple[Command, ...] = ()
    """Programs that run at the same time."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text by path: written before the first command starts."""
    patience: float = 600
    """Seconds that ranks get to end after they were asked to."""
    waits: bool = True
    """True if ``run`` returns when the run has ended; False if it is in a
    queue, or starts nothing.
    """

    def __str__(self) -> str:
        """Return files and commands as text for the screen."""
        files = [f"# {path}\n{text}" for path, text in self.files.items()]
        return "\n".join([*files, *map(str, self.commands)])


class Launcher(Protocol):
    """How ranks come to life. An entry point of the group ``distcore.launchers`` is a class
    that takes no arguments.

    One of a cluster may have ``plan_sweep(specs)``: the plan of all of several runs, by name;
    ``None``: one by one.
    """

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the plan for ``spec`` without changing anything. Raises ConfigError, one line."""

    def run(self, plan: LaunchPlan) -> int:
        """Start ``plan``, wait for its end and return the exit status.
        Raises ConfigError, one line.
        """
