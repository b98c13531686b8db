"""``--launcher ray`` on a real Ray cluster of two machines, and what happens when one of
them is turned off.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import machine_job as job
import pytest
from machines import PATIENCE, Machine, wait_for
from ray_cluster import BIN, RayCluster, ray_cluster

SLOW = "--set task_options.seconds=0.3"


@pytest.fixture
def ray(nodes: tuple[Machine, ...]) -> Iterator[RayCluster]:
    if not (BIN / "ray").exists():
        pytest.skip(f"no {BIN}/ray: make machines makes it")
    with ray_cluster(nodes) as made:
        yield made


def start(ray: RayCluster, folder: Path, flags: str) -> subprocess.Popen[str]:
    words = (
        f"-m distcore train {job.FLAGS} --launcher ray:{ray.address} --nproc 1 --strategy ddp --out"
        f" run --resume auto --set timeout=60 --log-dir logs {flags}"
    )
    return ray.machines[0].start(BIN / "python", *words.split(), folder=folder)


def is_quiet(ray: RayCluster) -> bool:
    return not any(machine.ranks() for machine in ray.machines)


def test_ranks_on_two_nodes_have_the_losses_of_one_process_also_after_sigterm(
    ray: RayCluster, single: Path, tmp_path: Path
) -> None:
    launcher = start(ray, tmp_path, f"--nodes 2 --max-steps 40 {SLOW}")
    wait_for((tmp_path / "run/checkpoints/step-00000005").exists, launcher)
    assert [len(machine.ranks()) for machine in ray.machines] == [1, 1]
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=PATIENCE)[0]
    newest = max(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert launcher.returncode == 143, said
    assert f"stopped after step {int(newest[-8:])} of 40; go on" in said
    assert is_quiet(ray)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "rank-0.log",
        "rank-1.log",
    ]
    again = start(ray, tmp_path, "--nodes 2 --max-steps 40")
    said = again.communicate(timeout=PATIENCE)[0]
    assert again.returncode == 0, said
    job.is_same(tmp_path / "run", single, 40)


def test_a_run_goes_on_without_a_node_that_is_turned_off_and_takes_in_one_that_comes(
    ray: RayCluster, nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    launcher = start(ray, tmp_path, f"--nodes 1:2 --max-steps 120 {SLOW}")
    try:
        wait_for((tmp_path / "run/checkpoints/step-00000005").exists, launcher)
        assert [len(machine.ranks()) for machine in nodes] == [1, 1]
        nodes[1].kill()
        before = max(job.losses(tmp_path / "run"))
        wait_for(lambda: max(job.losses(tmp_path / "run")) > before + 10, launcher)
        assert [len(machine.ranks()) for machine in nodes] == [1, 0]
        nodes[1].turn_on()
        ray.begun["node1"].wait()
        ray.join(nodes[1])
        wait_for(lambda: [len(machine.ranks()) for machine in nodes] == [1, 1], launcher)
        said = launcher.communicate(timeout=PATIENCE)[0]
    finally:
        nodes[1].heal()
        launcher.terminate()
    assert launcher.returncode == 0, said
    assert "going on with 1 node(s)" in said
    assert "another node has come: going on with 2 node(s)" in said
    assert "Traceback" not in said
    job.is_same(tmp_path / "run", single, 120)


def test_a_killed_rank_ends_the_run_with_one_line_or_starts_all_again(
    ray: RayCluster, single: Path, tmp_path: Path
) -> None:
    launcher = start(ray, tmp_path, f"--nodes 2 --max-steps 40 --max-restarts 1 {SLOW}")
    for newest in ("step-00000005", "step-00000030"):
        wait_for((tmp_path / f"run/checkpoints/{newest}").exists, launcher)
        (rank,) = ray.machines[1].ranks()
        os.kill(rank, signal.SIGKILL)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 3, said
    assert (
        len(
            re.findall(
                r"^rank \d on node1 was killed by SIGKILL: going on with 2 node\(s\)$", said, re.M
            )
        )
        == 1
    )
    assert re.search(r"^error: rank \d on node1 was killed by SIGKILL$", said, re.M)
    job.is_same(tmp_path / "run", single, max(job.losses(tmp_path / "run")))


def test_a_killed_launcher_leaves_no_rank(ray: RayCluster, tmp_path: Path) -> None:
    launcher = start(ray, tmp_path, f"--nodes 2 --max-steps 120 {SLOW}")
    wait_for((tmp_path / "run/checkpoints/step-00000005").exists, launcher)
    os.killpg(launcher.pid, signal.SIGKILL)
    wait_for(lambda: is_quiet(ray))


def test_the_runs_of_a_sweep_are_tasks_and_go_on_after_sigterm(
    ray: RayCluster, single: Path, tmp_path: Path
) -> None:
    words = (
        f"-m distcore train {job.FLAGS} --launcher ray:{ray.address} --nproc 2 --strategy ddp --out"
        f" sweep --set timeout=60 --max-steps 20 {SLOW} --sweep seed=0,1,2"
    )
    launcher = ray.machines[0].start(BIN / "python", *words.split(), folder=tmp_path)
    runs = [tmp_path / f"sweep/seed={seed}" for seed in range(3)]
    wait_for((runs[0] / "checkpoints/step-00000005").exists, launcher)
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 143, said
    assert is_quiet(ray)
    assert "stopped after step " in (tmp_path / "sweep/seed=0.log").read_text()
    for expected in ("ended with exit code 0", "seed=2: finished already"):
        again = ray.machines[0].start(BIN / "python", *words.split(), folder=tmp_path)
        said = again.communicate(timeout=PATIENCE)[0]
        assert again.returncode == 0, said
        assert expected in said
    assert "resumed from sweep/seed=0/checkpoints/" in (tmp_path / "sweep/seed=0.log").read_text()
    assert all(sorted(job.losses(run)) == list(range(1, 21)) for run in runs)
    job.is_same(runs[0], single, 20)
