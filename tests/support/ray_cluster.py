"""A Ray cluster on the machines of ``machines``: the head on the first of them, and
a node on each.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from machines import PATIENCE, Machine, wait_for

BIN = Path(__file__).parents[2] / "build/ray/bin"
"""Programs of a separate environment, which has Ray and this environment's packages."""
PORT = 6379
PROBE = """
import ray
ray.init(address="auto", log_to_driver=False)
print("there:", sum(node["Alive"] for node in ray.nodes()))
"""


@dataclass
class RayCluster:
    """A Ray that runs."""

    machines: Sequence[Machine]
    """The nodes; the first one is the head."""
    folder: Path
    """Folder of all nodes' files; its path is short, because it holds sockets."""
    begun: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    """The process ``ray start --block`` of each machine, by name."""

    @property
    def address(self) -> str:
        """Address of the head, for ``--launcher ray:ADDRESS``."""
        return f"{self.machines[0].address}:{PORT}"

    def join(self, machine: Machine) -> None:
        """Start Ray on a machine."""
        head = machine is self.machines[0]
        place = (
            (
                "--head",
                "--port",
                str(PORT),
                "--include-dashboard",
                "false",
                "--disable-usage-stats",
                "--temp-dir",
                str(self.folder),
            )
            if head
            else ("--address", self.address)
        )
        size = ("--num-cpus", "2", "--object-store-memory", "100000000")
        words = (
            BIN / "ray",
            "start",
            "--block",
            *place,
            *size,
            "--node-ip-address",
            machine.address,
        )
        self.begun[machine.name] = machine.start(
            *words, folder=self.folder, stdout=subprocess.DEVNULL
        )

    def wait(self, number: int) -> None:
        """Wait until Ray knows ``number`` nodes that are alive."""
        head = self.machines[0]
        probe = (BIN / "python", "-c", PROBE)

        def is_there() -> bool:
            return f"there: {number}\n" in head.output(*probe, folder=self.folder)

        wait_for(is_there, *self.begun.values(), pause=1)


@contextmanager
def ray_cluster(machines: Sequence[Machine]) -> Iterator[RayCluster]:
    """Start Ray on all machines; end it."""
    cluster = RayCluster(machines, Path(tempfile.mkdtemp(prefix="ray")))
    try:
        for machine in machines:
            cluster.join(machine)
        cluster.wait(len(machines))
        yield cluster
    finally:
        for process in cluster.begun.values():
            process.terminate()
        for process in cluster.begun.values():
            process.wait(timeout=PATIENCE)
        shutil.rmtree(cluster.folder, ignore_errors=True)
