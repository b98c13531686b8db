"""``--launcher ssh`` over a real sshd on two machines."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import machine_job as job
import pytest
from machines import PATIENCE, Machine, has_ssh, wait_for

pytestmark = pytest.mark.skipif(
    not has_ssh(), reason="no sshd: apt-get install openssh-server openssh-client"
)
STEPS = 40


def start(node: Machine, folder: Path, flags: str = "") -> subprocess.Popen[str]:
    (folder / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    words = (
        f"distcore train {job.FLAGS} --launcher ssh --hostfile hosts --strategy ddp --out run"
        f" --resume auto --log-dir logs --set timeout=120 --max-steps {STEPS} {flags}"
    )
    return node.start(*words.split(), folder=folder)


def slow(node: Machine, folder: Path) -> subprocess.Popen[str]:
    """A run that has done five steps of a quarter of a second."""
    launcher = start(node, folder, "--set task_options.seconds=0.25")
    wait_for((folder / "run/checkpoints/step-00000005").exists, launcher)
    return launcher


def is_quiet(nodes: tuple[Machine, ...]) -> bool:
    return not any(node.find("distcore_clusters.agent") or node.ranks() for node in nodes)


def newest(folder: Path) -> int:
    return max(int(path.name[-8:]) for path in folder.glob("run/checkpoints/step-*"))


def test_sigterm_stops_both_machines_with_a_checkpoint_and_the_run_goes_on_from_there(
    nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    launcher = slow(nodes[0], tmp_path)
    assert [len(node.ranks()) for node in nodes] == [1, 1]
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 143, said
    assert f"stopped after step {newest(tmp_path)}" in said
    assert is_quiet(nodes)
    lines = [line for line in said.splitlines() if "go on with: " in line]
    command = shlex.split(lines[0].partition("go on with: ")[2])
    again = nodes[0].start(*command, "--set", "task_options.seconds=0", folder=tmp_path)
    said = again.communicate(timeout=PATIENCE)[0]
    assert again.returncode == 0, said
    job.is_same(tmp_path / "run", single, STEPS)


def test_two_ranks_on_each_machine_have_the_losses_of_one_process(
    nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=2\nnode1 slots=2\n")
    words = (
        f"distcore train {job.FLAGS} --launcher ssh --hostfile hosts --strategy ddp --out run"
        " --max-steps 12"
    )
    nodes[0].run(*words.split(), folder=tmp_path)
    job.is_same(tmp_path / "run", single, 12)


def test_a_killed_launcher_leaves_a_checkpoint_and_no_rank(
    nodes: tuple[Machine, ...], tmp_path: Path
) -> None:
    launcher = slow(nodes[0], tmp_path)
    done = max(job.losses(tmp_path / "run"))
    launcher.kill()
    os.killpg(launcher.pid, signal.SIGKILL)
    wait_for(lambda: is_quiet(nodes))
    assert newest(tmp_path) >= done


def test_a_killed_rank_is_one_line_that_names_its_machine(
    nodes: tuple[Machine, ...], tmp_path: Path
) -> None:
    launcher = slow(nodes[0], tmp_path)
    (rank,) = nodes[1].ranks()
    os.kill(rank, signal.SIGKILL)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 3, said
    assert "error: rank 1 on node1 was killed by SIGKILL" in said
    assert "Traceback" not in said
    assert is_quiet(nodes)


def test_a_machine_that_cannot_be_reached_is_one_line(
    nodes: tuple[Machine, ...], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode7 slots=1\n")
    words = f"distcore train {job.FLAGS} --launcher ssh --hostfile hosts --strategy ddp --out run"
    launcher = nodes[0].start(*words.split(), folder=tmp_path)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 3, said
    assert "error: node7: ssh cannot reach it, or lost the connection; try: ssh node7 true" in said
