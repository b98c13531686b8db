"""``--launcher mpi`` with Open MPI and with MPICH on two machines; both start
their helpers over ssh.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import machine_job as job
import pytest
from machines import PATIENCE, Machine, has_ssh, wait_for

KINDS = {"openmpi": "mpirun", "mpich": "mpiexec.hydra"}
PACKAGES = {"openmpi": "openmpi-bin", "mpich": "mpich"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(KINDS[name]) is None or not has_ssh():
        pytest.skip(
            f"no {KINDS[name]} or no sshd: apt-get install {PACKAGES[name]} openssh-server"
            " openssh-client"
        )
    return name


def start(node: Machine, kind: str, folder: Path, flags: str) -> subprocess.Popen[str]:
    (folder / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    words = (
        f"distcore train {job.FLAGS} --launcher mpi:{kind} --hostfile hosts --strategy ddp --out"
        f" run --set timeout=120 {flags}"
    )
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return node.start(*words.split(), folder=folder, environment=root)


def test_ranks_on_two_machines_have_the_losses_of_one_process(
    kind: str, nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    launcher = start(nodes[0], kind, tmp_path, "--max-steps 12 --set task_options.seconds=0.3")
    wait_for(lambda: all(node.ranks() for node in nodes), launcher)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 0, said
    job.is_same(tmp_path / "run", single, 12)


def test_a_killed_rank_ends_all_of_them(
    kind: str, nodes: tuple[Machine, ...], tmp_path: Path
) -> None:
    launcher = start(nodes[0], kind, tmp_path, "--max-steps 120 --set task_options.seconds=0.3")
    wait_for((tmp_path / "run/checkpoints/step-00000005").exists, launcher)
    (rank,) = nodes[1].ranks()
    os.kill(rank, signal.SIGKILL)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode != 0, said
    wait_for(lambda: not any(node.ranks() for node in nodes))


def test_an_mpirun_of_another_mpi_is_one_line(nodes: tuple[Machine, ...], tmp_path: Path) -> None:
    if shutil.which("mpirun.mpich") is None:
        pytest.skip("no mpirun.mpich: apt-get install mpich")
    (tmp_path / "mpirun").symlink_to(str(shutil.which("mpirun.mpich")))
    words = f"distcore train {job.FLAGS} --launcher mpi --nproc 1 --strategy ddp --out run"
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    launcher = nodes[0].start(*words.split(), folder=tmp_path, environment=path)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 2, said
    assert (
        "error: --launcher mpi: mpirun on PATH is not Open MPI's; for MPICH or Intel MPI:"
        " --launcher mpi:mpich" in said
    )
