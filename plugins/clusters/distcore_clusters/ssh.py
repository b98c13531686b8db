"""``--launcher ssh``: an agent on each machine of the hostfile, in the same folder and
with the same interpreter.

Each agent watches its stdin, a lifeline: it ends, and its ranks save a checkpoint first, as soon as
the ssh that started it is gone.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import ClassVar

from distcore import ConfigError, RankError
from distcore.launchers import (
    Command,
    Host,
    LaunchPlan,
    LaunchSpec,
    check_programs,
    refuse,
    write_files,
)
from distcore_clusters.planning import agent_command, fixed_nodes, limited, port_of

OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
"""No question for a password, and an end within 45 seconds where the machine or
the link is gone.
"""
UNREACHABLE = 255
"""ssh's own exit status; any other is that of the program."""
POLL = 0.1
"""Seconds between two looks at the agents."""


class SshLauncher:
    """Starts an agent per machine over ssh; SIGTERM and Ctrl-C stop all of
    them, after a checkpoint.
    """

    example: ClassVar = {"hosts": (Host(name="host0", slots=2), Host(name="host1", slots=2))}

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return a command of ssh for each machine.

        The value is the port of sshd, if ssh's own config has another port. Raises ConfigError
        without a hostfile, and for restarts.
        """
        is_port = spec.value.isdecimal() and 0 < int(spec.value) < 2**16
        if spec.value and not is_port:
            raise ConfigError(
                f"--launcher ssh:{spec.value}: expected ssh:PORT, a number from 1 to 65535"
            )
        restarts = f"--max-restarts {spec.max_restarts}" if spec.max_restarts else ""
        refuse(
            "ssh",
            {restarts: restarts},
            "start it again with --resume auto, or use --launcher torchrun",
        )
        fixed_nodes("ssh", spec)
        if spec.hosts is None:
            raise ConfigError(
                "--launcher ssh: on which machines? --hostfile FILE, with lines such as: host0"
                " slots=4"
            )
        hosts = limited(spec.hosts, spec.nproc, spec.nodes)
        commands = (_command(spec, hosts, node) for node in range(len(hosts)))
        return LaunchPlan(commands=tuple(commands), patience=spec.timeout)

    def run(self, plan: LaunchPlan) -> int:
        """Start all agents and wait for them; once one fails, the others end, too."""
        from distcore.launchers.processes import handle_stop_signals

        check_programs(plan)
        write_files(plan.files)
        signals: list[int] = []
        with ExitStack() as stack:
            stack.enter_context(handle_stop_signals(signals.append))
            # In sessions of their own: a terminal would send Ctrl-C to every ssh, which would then
            # end at once.
            agents = [
                subprocess.Popen(command.words, stdin=subprocess.PIPE, start_new_session=True)
                for command in plan.commands
            ]
            stack.callback(_end, agents)
            return _wait(plan, agents, signals)


def _command(spec: LaunchSpec, hosts: tuple[Host, ...], node: int) -> Command:
    """Return the command that starts the agent of machine number ``node``."""
    host = hosts[node]
    flags = ["--nnodes", str(len(hosts)), "--node-rank", str(node)]
    flags += ["--nproc-per-node", str(host.slots)]
    flags += ["--master-addr", hosts[0].name, "--master-port", str(port_of(spec))]
    flags += ["--shutdown-timeout", str(int(spec.timeout))]
    agent = agent_command(spec, flags, host, elsewhere=True)
    settings = "env " if agent.environment else ""
    # exec: a signal to the shell would not reach the agent.
    line = f"cd {shlex.quote(spec.here.folder)} && exec {settings}{agent}"
    port = ("-p", spec.value) if spec.value else ()
    words = ("ssh", *OPTIONS, *port, host.name, line)
    return Command(words=words, host=host.name)


def _are_running(agents: list[subprocess.Popen[bytes]]) -> bool:
    """Return True unless all agents have ended; asks each, so that its status is read."""
    statuses = [agent.poll() for agent in agents]
    return None in statuses


def _failure(
    plan: LaunchPlan, agents: list[subprocess.Popen[bytes]], are_over: bool
) -> tuple[str, int] | None:
    """Return machine and status of the first failed agent in the order of machines.

    If they ``are_over``, one that has no status yet has failed, too.
    """
    for command, agent in zip(plan.commands, agents, strict=True):
        if agent.returncode:
            return str(command.host), agent.returncode
        if are_over and agent.returncode is None:
            return str(command.host), RankError.exit_code
    return None


def _wait(plan: LaunchPlan, agents: list[subprocess.Popen[bytes]], signals: list[int]) -> int:
    """Return 0 once all agents have succeeded, else the status of the first failed one."""
    first_failure: tuple[str, int] | None = None
    deadline = float("inf")
    while _are_running(agents) and time.monotonic() < deadline:
        first_failure = first_failure or _failure(plan, agents, are_over=False)
        if (first_failure or signals) and deadline == float("inf"):
            # The others save a checkpoint in this time.
            deadline = time.monotonic() + plan.patience
            _let_go(agents)
        time.sleep(POLL)
    first_failure = first_failure or _failure(plan, agents, are_over=True)
    if first_failure is None:
        return 0
    if signals:
        return 128 + signals[0]
    host, status = first_failure
    if status == UNREACHABLE:
        print(
            f"error: {host}: ssh cannot reach it, or lost the connection; try: ssh {host} true",
            file=sys.stderr,
        )
        return RankError.exit_code
    return status


def _let_go(agents: list[subprocess.Popen[bytes]]) -> None:
    """Close the lifelines: each agent that still runs sends SIGTERM to its ranks."""
    for agent in agents:
        if agent.stdin is not None:
            agent.stdin.close()


def _end(agents: list[subprocess.Popen[bytes]]) -> None:
    """Kill the remaining ssh processes."""
    _let_go(agents)
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()
        agent.wait()
