"""Launchers at work: two agents that take each other for another machine, over a stand-in
for ssh and without.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DEADLINE = 200
FLAGS = (
    "--data rows.jsonl --model bert-tiny --strategy ddp --set device=cpu --global-batch-size 8"
    " --eval-every 1000 --set task_options.max_seq_len=8 --log-every 5 --save-every 20 --out run"
    " --resume auto --log-dir logs"
)

LOGS = """
from torch.distributed.elastic.agent.server.api import logger
from distcore.launchers.processes.contexts import silence_torchelastic
logger.warning("before")
with silence_torchelastic():
    logger.warning("Received 15 death signal")
logger.warning("after")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"text": f"{word} {n}", "label": label}
        for n in range(400)
        for word, label in (("good", 1), ("bad", 0))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    ssh = (
        tmp_path / "bin/ssh"
    )  # the command as sshd would run it: by a shell, without a terminal, in a process of its own
    ssh.parent.mkdir()
    ssh.write_text(
        '#!/bin/bash\necho "$@" >> ssh-calls\nfor last; do :; done\nexec bash -c "$last"\n'
    )
    ssh.chmod(0o755)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts ``distcore train`` with these flags; ends what a test leaves."""
    begun: list[subprocess.Popen[str]] = []

    def begin(flags: str) -> subprocess.Popen[str]:
        environ = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "distcore", "train", *FLAGS.split(), *flags.split()]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        begun.append(subprocess.Popen(command, cwd=folder, env=environ, text=True, **pipes))  # type: ignore[call-overload]
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


@pytest.mark.programs
def test_torchelastic_prints_nothing_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    assert [line.partition("] ")[2] for line in done.stderr.splitlines()] == ["before", "after"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("distcore-clusters", "distcore-ddp", "distcore-tasks")
@pytest.mark.timeout(2 * DEADLINE)
def test_sigterm_to_the_ssh_launcher_stops_all_machines_with_a_checkpoint(
    folder: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    launcher = start("--launcher ssh --hostfile hosts --max-steps 4000")
    wait_for(folder / "run/checkpoints/step-00000020", launcher)
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == 143, said
    assert "stopped after step" in said[1]
    (step,) = {
        int(line.partition("stopped after step ")[2].split()[0])
        for line in said[1].splitlines()
        if "stopped" in line
    }
    assert (folder / f"run/checkpoints/step-{step:08}").is_dir()
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    calls = (folder / "ssh-calls").read_text().splitlines()
    assert sorted(call.split()[6] for call in calls) == ["127.0.0.1", "localhost"]
    report_world = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[0])
    assert report_world["step"] == 5


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("distcore-clusters", "distcore-ddp", "distcore-tasks")
@pytest.mark.timeout(4 * DEADLINE)
@pytest.mark.parametrize("what", ["a rank is killed", "a node joins later"])
def test_agents_start_all_ranks_again(
    what: str, folder: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    nodes = "2" if what == "a rank is killed" else "1:2"
    flags = (
        f"--launcher torchrun:127.0.0.1:29519 --nodes {nodes} --nproc 1 --max-restarts 1"
        " --max-steps 400"
    )
    agents = [start(flags)]
    if what == "a rank is killed":
        agents.append(start(flags))
    wait_for(folder / "run/checkpoints/step-00000040", agents[0])
    if what == "a rank is killed":
        (rank,) = psutil.Process(agents[0].pid).children()
        rank.kill()
    else:
        agents.append(start(flags))
    said = [agent.communicate(timeout=2 * DEADLINE) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    report = json.loads((folder / "run/report.json").read_text())
    assert (report["steps"], report["world_size"]) == (400, 2)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp", "distcore-tasks")
@pytest.mark.timeout(DEADLINE)
def test_machines_without_a_common_run_folder_end_before_they_train(folder: Path) -> None:
    ranks = []
    for rank in range(2):
        own = folder / f"machine-{rank}"
        own.mkdir()
        (own / "rows.jsonl").symlink_to(folder / "rows.jsonl")
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29523",
        }
        flags = FLAGS.removesuffix(" --log-dir logs").split()
        command = [sys.executable, "-m", "distcore", "train", *flags, "--max-steps", "5"]
        environ = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(
            subprocess.Popen(command, cwd=own, env=environ, text=True, stderr=subprocess.PIPE)
        )
    said = "".join(rank.communicate(timeout=DEADLINE)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "error: out = '" in said
    assert (
        "does not see there what rank 0 writes: --out must be one folder for all machines" in said
    )
    assert not list(folder.glob("machine-*/run/*"))
