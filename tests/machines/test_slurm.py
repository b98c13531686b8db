"""``--launcher slurm`` under a real SLURM with two machines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import machine_job as job
import pytest
from machines import Machine, wait_for
from slurm_cluster import Cluster, cluster, missing

STEPS = 60
SLOW = "--set task_options.seconds=0.3"


@pytest.fixture(scope="module")
def slurm(
    nodes: tuple[Machine, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if programs := missing():
        pytest.skip(
            f"no {', '.join(programs)}: apt-get install slurmctld slurmd slurm-client munge"
        )
    with cluster(nodes, tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submit(slurm: Cluster, folder: Path, flags: str = "", steps: int = STEPS) -> int:
    words = (
        f"distcore train {job.FLAGS} --launcher slurm --nodes 2 --nproc 1 --strategy ddp --out run"
        f" --log-dir logs --set timeout=120 --max-steps {steps} {flags}"
    )
    return slurm.submit(*words.split(), folder=folder)


def said(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob("distcore-*.log"))


def wait_for_step(slurm: Cluster, number: int, folder: Path, step: int) -> None:
    def is_there() -> bool:
        state = slurm.state(number, folder)
        assert state in ("PENDING", "RUNNING"), (state, said(folder))
        return bool(step_there := newest(folder)) and step_there >= step

    wait_for(is_there, pause=0.5)


def newest(folder: Path) -> int:
    return max((int(path.name[-8:]) for path in folder.glob("run/checkpoints/step-*")), default=0)


def test_a_job_that_is_requeued_and_preempted_has_the_losses_of_one_process(
    slurm: Cluster, single: Path, tmp_path: Path
) -> None:
    number = submit(slurm, tmp_path, SLOW)
    wait_for_step(slurm, number, tmp_path, 5)
    slurm.call("scontrol", "requeue", str(number), folder=tmp_path)
    slurm.start_now(number, tmp_path)
    wait_for_step(slurm, number, tmp_path, newest(tmp_path) + 5)
    (tmp_path / "urgent.sh").write_text("#!/bin/sh\nsleep 1\n")
    urgent = slurm.submit(
        "sbatch", "--partition=high", "--nodes=2", "--exclusive", "urgent.sh", folder=tmp_path
    )
    slurm.wait(urgent, "COMPLETED", folder=tmp_path)
    before = newest(tmp_path)
    slurm.start_now(number, tmp_path)
    slurm.wait(number, "COMPLETED", folder=tmp_path)
    assert f"at step {before}" in said(tmp_path)
    assert slurm.show(number, tmp_path)["Restarts"] == "2"
    job.is_same(tmp_path / "run", single, STEPS)


def test_scancel_leaves_a_checkpoint_from_which_a_new_job_goes_on(
    slurm: Cluster, single: Path, tmp_path: Path
) -> None:
    number = submit(slurm, tmp_path, SLOW)
    wait_for_step(slurm, number, tmp_path, 5)
    slurm.call("scancel", str(number), folder=tmp_path)
    slurm.wait(number, "CANCELLED", folder=tmp_path)
    wait_for(lambda: f"stopped after step {newest(tmp_path)} " in said(tmp_path))
    again = submit(slurm, tmp_path, "--resume auto", steps=STEPS)
    slurm.wait(again, "COMPLETED", folder=tmp_path)
    job.is_same(tmp_path / "run", single, STEPS)


def test_a_job_whose_time_is_over_saves_a_checkpoint(slurm: Cluster, tmp_path: Path) -> None:
    words = (
        f"distcore train {job.FLAGS} --launcher slurm --nodes 2 --nproc 1 --strategy ddp --out run"
        " --log-dir logs"
    )
    limited = ("env", "SBATCH_TIMELIMIT=4", *words.split(), "--max-steps", "1000", *SLOW.split())
    number = slurm.submit(*limited, folder=tmp_path)
    slurm.wait(number, "FAILED", "TIMEOUT", "COMPLETED", folder=tmp_path)
    assert f"stopped after step {newest(tmp_path)} " in said(tmp_path)
    assert slurm.show(number, tmp_path)["ExitCode"] == "143:0"


def test_a_killed_rank_ends_the_job_with_one_line_and_a_new_job_goes_on(
    slurm: Cluster, single: Path, tmp_path: Path
) -> None:
    number = submit(slurm, tmp_path, SLOW)
    wait_for_step(slurm, number, tmp_path, 5)
    (rank,) = slurm.nodes[1].ranks()
    os.kill(rank, signal.SIGKILL)
    slurm.wait(number, "FAILED", folder=tmp_path)
    assert "node1: task 1: Killed" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    again = submit(slurm, tmp_path, "--resume auto")
    slurm.wait(again, "COMPLETED", folder=tmp_path)
    job.is_same(tmp_path / "run", single, STEPS)


def test_a_job_whose_node_dies_goes_back_into_the_queue_and_goes_on(
    slurm: Cluster, single: Path, tmp_path: Path
) -> None:
    number = submit(slurm, tmp_path, SLOW)
    wait_for_step(slurm, number, tmp_path, 5)
    node = slurm.nodes[1]
    node.kill()
    # The controller would find out after its SlurmdTimeout, five minutes.
    slurm.call("scontrol", "update", "nodename=node1", "state=down", "reason=dead", folder=tmp_path)
    slurm.wait(number, "PENDING", folder=tmp_path)
    node.turn_on()
    slurm.start_daemon(node)
    slurm.call("scontrol", "update", "nodename=node1", "state=resume", folder=tmp_path)
    slurm.start_now(number, tmp_path)
    slurm.wait(number, "COMPLETED", folder=tmp_path)
    assert slurm.show(number, tmp_path)["Restarts"] == "1"
    job.is_same(tmp_path / "run", single, STEPS)


def test_inside_an_allocation_it_is_a_step_here_of_two_ranks_per_node(
    slurm: Cluster, single: Path, tmp_path: Path
) -> None:
    words = (
        f"salloc --nodes 2 --ntasks-per-node 2 distcore train {job.FLAGS} --launcher slurm --nodes"
        " 2 --nproc 2 --strategy ddp --out run --max-steps 12"
    )
    slurm.call(*words.split(), folder=tmp_path)
    job.is_same(tmp_path / "run", single, 12)


def test_a_sweep_is_an_array_and_the_same_command_shows_what_it_came_to(
    slurm: Cluster, single: Path, tmp_path: Path
) -> None:
    words = (
        f"distcore train {job.FLAGS} --launcher slurm --nproc 2 --strategy ddp --out sweep"
        " --log-dir logs --max-steps 12 --sweep seed=0,1,2"
    )
    slurm.submit(*words.split(), folder=tmp_path)
    runs = [tmp_path / f"sweep/seed={seed}" for seed in range(3)]
    wait_for(lambda: all((run / "report.json").is_file() for run in runs), pause=0.5)
    assert "Traceback" not in said(tmp_path)
    table = slurm.call(*words.split(), folder=tmp_path)
    assert [line.split()[0] for line in table.splitlines() if line.startswith("seed=")] == [
        run.name for run in runs
    ]
    assert "Submitted" not in table
    assert len({tuple(job.losses(run).values()) for run in runs}) == 3
    job.is_same(runs[0], single, 12)


def test_trials_that_wait_for_each_other_are_steps_of_an_allocation(
    slurm: Cluster, tmp_path: Path
) -> None:
    words = (
        f"salloc --nodes 2 --ntasks-per-node 1 distcore train {job.FLAGS} --launcher slurm --nodes"
        " 2 --nproc 1 --strategy ddp --out sweep --max-steps 6 --trials 2"
    )
    said = slurm.call(*words.split(), "--sweep", "optimizer.eps=1e-8..1e-3 log", folder=tmp_path)
    runs = [
        path
        for path in (tmp_path / "sweep").glob("optimizer.eps=*")
        if (path / "report.json").is_file()
    ]
    assert len(runs) == 2
    assert "best: optimizer.eps=" in said
