"""Two machines on one: network namespaces on a bridge, each with its own host name,
hosts file and ssh.

Processor, disk and process numbers are common. Needs root, ``ip``, ``nsenter`` and ``unshare``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SSH = "/etc/ssh"
PATIENCE = 600
"""Seconds until a test gives up. On an idle machine most waits take ten."""
ENTER = (
    'hostname "$1" && mount --bind "$2/hosts-$1" /etc/hosts && '
    '{ [ ! -d "$2/ssh" ] || mount --bind "$2/ssh" /etc/ssh; } && shift 2 && exec "$@"'
)
"""Shell script that enters the namespaces and becomes the command; its
arguments: name, folder, command.
"""


RANK_VARIABLES = ("RANK=", "OMPI_COMM_WORLD_RANK=", "PMI_RANK=", "SLURM_PROCID=")
"""Variables of a rank under torchrun and similar launchers, Open MPI, MPICH and SLURM."""
PODS = ("distcore-{}.distcore", "distcore-node-0-{}.distcore")
"""Names that the machines have as pods of a plain Job, and of a JobSet."""


@dataclass(frozen=True)
class Machine:
    """One of the machines; a process belongs to it if it is in its network namespace."""

    name: str
    """Host name."""
    address: str
    """IP address."""
    namespace: str
    """Name of the network namespace. The machine's end of the link has the prefix ``v``."""
    bridge: str
    """Name of the bridge that connects all links."""
    files: Path
    """Folder of the hosts files, and of the files in /etc/ssh."""

    def words(self, *command: str | Path) -> list[str]:
        """Return the command line that runs ``command`` on this machine."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", ENTER, "sh", self.name, str(self.files), *map(str, command)]

    def start(
        self,
        *command: str | Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        **pipes: Any,
    ) -> subprocess.Popen[str]:
        """Start ``command`` in ``folder``, in a new session, with both outputs in one pipe."""
        given = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
            "text": True,
            **pipes,
        }
        environ = {**os.environ, **(environment or {})}
        return subprocess.Popen(self.words(*command), cwd=folder, env=environ, **given)

    def run(
        self, *command: str | Path, folder: Path, environment: Mapping[str, str] | None = None
    ) -> str:
        """Run ``command``, and return its output. Fails with the output if the status is not 0."""
        process = self.start(*command, folder=folder, environment=environment)
        said = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 0, said
        return said

    def output(
        self, *command: str | Path, folder: Path, environment: Mapping[str, str] | None = None
    ) -> str:
        """Run ``command``, and return its output, with any status."""
        return self.start(*command, folder=folder, environment=environment).communicate(
            timeout=PATIENCE
        )[0]

    def pids(self) -> list[int]:
        """Return the numbers of all processes of this machine."""
        return [int(word) for word in _ip("netns", "pids", self.namespace).split()]

    def find(self, *words: str) -> list[int]:
        """Return the numbers of the processes of this machine with all
        ``words`` in their command line.
        """
        pids = []
        for pid in self.pids():
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                pids += [pid] if all(word in line for word in words) else []
        return pids

    def ranks(self) -> list[int]:
        """Return the numbers of the rank processes of this machine, under any launcher."""
        pids = []
        for pid in self.find("distcore train"):
            with suppress(OSError):
                settings = Path(f"/proc/{pid}/environ").read_text().split("\0")
                program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
                told = any(setting.startswith(RANK_VARIABLES) for setting in settings)
                pids += [pid] if told and program.startswith("python") else []
        return pids

    def cut(self) -> None:
        """Take the machine off the network: all its messages, in both
        directions, are silently lost.
        """
        _ip("link", "set", f"v{self.namespace}", "nomaster")

    def heal(self) -> None:
        """Undo ``cut``."""
        _ip("link", "set", f"v{self.namespace}", "master", self.bridge)

    def turn_on(self) -> None:
        """Undo ``kill``, and start the link and the ssh server."""
        self.heal()
        if has_ssh():
            server = ("/usr/sbin/sshd", "-D", "-f", f"{SSH}/sshd_config")
            self.start(*server, folder=self.files, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """Turn the machine off: no link, no processes."""
        self.cut()
        self.end()

    def end(self) -> None:
        """Kill all processes of the machine, at once."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def why_not() -> str | None:
    """Return the reason why machines cannot be made here; ``None`` if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install iproute2 util-linux"
    name = f"t{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except AssertionError as error:
        return f"network namespaces cannot be made: {error}"
    return None


@contextmanager
def machines(folder: Path, number: int = 2) -> Iterator[tuple[Machine, ...]]:
    """Yield machines node0, node1 … with Debian's form of hosts files, and with ssh
    if it is installed.
    """
    own = os.getpid()
    bridge, net = f"b{own}", f"10.{64 + own // 250 % 128}.{own % 250}"
    made = tuple(
        Machine(f"node{n}", f"{net}.{n + 1}", f"n{own}-{n}", bridge, folder) for n in range(number)
    )
    with ExitStack() as stack:
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for machine in made:
            _connect(machine, stack)
            others = [f"{other.address} {other.name}\n" for other in made if other is not machine]
            pods = [
                f"{other.address} {' '.join(pod.format(n) for pod in PODS)}\n"
                for n, other in enumerate(made)
            ]
            text = f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n{''.join([*others, *pods])}"
            (folder / f"hosts-{machine.name}").write_text(text)
        if has_ssh():
            _write_ssh(folder / "ssh")
        for machine in made:
            machine.turn_on()
        yield made


def has_ssh() -> bool:
    """Return True if ssh and its server are installed."""
    return shutil.which("ssh") is not None and Path("/usr/sbin/sshd").exists()


def wait_for(
    condition: Callable[[], object],
    *processes: subprocess.Popen[str],
    seconds: float = PATIENCE,
    pause: float = 0.05,
) -> None:
    """Wait until ``condition`` holds; fails when one of ``processes`` ends before
    that, or after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(pause)


def _connect(machine: Machine, stack: ExitStack) -> None:
    """Make the namespace of ``machine`` and its link to the bridge; ``stack`` undoes it."""
    name, link = machine.namespace, f"v{machine.namespace}"
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)
    stack.callback(machine.kill)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", link, "master", machine.bridge, "up")
    _ip("-n", name, "address", "add", f"{machine.address}/24", "dev", "eth0")
    for interface in ("lo", "eth0"):
        _ip("-n", name, "link", "set", interface, "up")


def _write_ssh(folder: Path) -> None:
    """Write the files in /etc/ssh of every machine: one key for servers and users,
    who trust each other.
    """
    folder.mkdir()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True
    )
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    (folder / "ssh_config").write_text(
        f"IdentityFile {SSH}/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel"
        " ERROR\n"
    )
    (folder / "sshd_config").write_text(
        f"HostKey {SSH}/key\nAuthorizedKeysFile {SSH}/authorized_keys\nPermitRootLogin"
        " yes\nStrictModes no\nUsePAM no\nPidFile none\nMaxStartups 100\n"
    )
    # sshd's folder for privilege separation, which its service would make
    Path("/run/sshd").mkdir(exist_ok=True)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
