"""SLURM on the machines of ``machines``: munge, the controller on the first of them,
and a daemon on each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machines import PATIENCE, Machine, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
"""Final states of a job."""
CONFIG = """\
ClusterName=two
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=60
MessageTimeout=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=9
"""
"""Content of slurm.conf."""


@dataclass(frozen=True)
class Cluster:
    """A SLURM that runs."""

    nodes: Sequence[Machine]
    """Its machines; commands are typed on the first one."""
    environment: dict[str, str]
    """Path of slurm.conf, for SLURM's programs."""
    begun: list[subprocess.Popen[str]]
    """Started servers."""

    def start(self, node: Machine, *server: str) -> None:
        """Start a server on a machine."""
        quiet = {"stdout": subprocess.DEVNULL, "folder": Path("/"), "environment": self.environment}
        self.begun.append(node.start(*server, **quiet))  # type: ignore[arg-type]

    def start_daemon(self, node: Machine) -> None:
        """Start the daemon of a machine, as its system does when it starts."""
        self.start(node, "slurmd", "-D", "-N", node.name)

    def call(self, *command: str, folder: Path) -> str:
        """Run a command and return what it prints; fails with that if it fails."""
        return self.nodes[0].run(*command, folder=folder, environment=self.environment)

    def submit(self, *command: str, folder: Path) -> int:
        """Run a command that submits a job; return the job's number."""
        said = self.call(*command, folder=folder)
        number = re.search(r"Submitted batch job (\d+)", said)
        assert number, said
        return int(number[1])

    def show(self, job: int, folder: Path) -> dict[str, str]:
        """Return the controller's facts about a job, such as ``JobState`` and ``ExitCode``."""
        words = self.call("scontrol", "-o", "show", "job", str(job), folder=folder).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def state(self, job: int, folder: Path) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETING,
        COMPLETED, FAILED, CANCELLED …
        """
        return self.show(job, folder)["JobState"]

    def wait(self, job: int, *states: str, folder: Path, seconds: float = PATIENCE) -> None:
        """Wait until a job is in one of ``states``; fails at once where it has
        ended in another one.
        """

        def is_there() -> bool:
            state = self.state(job, folder)
            assert state in states or state not in ENDS, (state, states)
            return state in states

        wait_for(is_there, seconds=seconds, pause=0.5)

    def start_now(self, job: int, folder: Path) -> None:
        """Start a job that was put back into the queue; by itself it would wait for two minutes."""
        self.wait(job, "PENDING", folder=folder)
        self.call("scontrol", "update", f"jobid={job}", "StartTime=now", folder=folder)


def missing() -> list[str]:
    """Return the programs that are not installed."""
    return [
        name
        for name in PROGRAMS
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]


@contextmanager
def cluster(nodes: Sequence[Machine], folder: Path) -> Iterator[Cluster]:
    """Start munge, controller and daemons; end them."""
    for name in ("state", *(f"spool-{node.name}" for node in nodes)):
        (folder / name).mkdir()
    lines = "\n".join(f"NodeName={node.name} NodeAddr={node.address} CPUs=2" for node in nodes)
    (folder / "slurm.conf").write_text(
        CONFIG.format(controller=nodes[0], folder=folder, nodes=lines)
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = ("key", "socket", "pid", "log", "seed")
    places = [f"--{name}-file={folder}/munge.{name}" for name in files if name != "socket"]
    munged = (
        "/usr/sbin/munged",
        "--foreground",
        "--force",
        f"--socket={folder}/munge.socket",
        *places,
    )
    given = {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
    }
    made = Cluster(nodes, given, [])
    try:
        made.start(nodes[0], *munged)
        wait_for((folder / "munge.socket").exists, *made.begun)
        made.start(nodes[0], "slurmctld", "-D", "-i")
        for node in nodes:
            made.start_daemon(node)
        info = ("sinfo", "-h", "-o", "%T %D")
        wait_for(
            lambda: "idle 2" in nodes[0].output(*info, folder=folder, environment=given),
            *made.begun,
            pause=0.5,
        )
        yield made
    finally:
        for process in reversed(made.begun):
            process.terminate()
        for process in made.begun:
            process.wait(timeout=PATIENCE)
