"""The command that ``--launcher ray`` would start, word for word, and its refusals.
No test needs Ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from distcore import ConfigError
from distcore.launchers import Here, Host, LaunchSpec
from distcore_ray.actor import Rank, RankAddress, rank_environment, variables_of
from distcore_ray.job import RayJob, read_job
from distcore_ray.launcher import RayLauncher

HERE = Here(folder="/work dir", python="/py", job="job-7", environment={"NCCL_DEBUG": "INFO"})
SPEC = LaunchSpec(train=("c.yaml", "--lr", "0.1"), environment={"A": "b c"}, here=HERE, nproc=2)
NODES: dict[str, Any] = {"nodes": (2, 2), "value": "host0:1"}
ELASTIC: dict[str, Any] = {
    "nodes": (1, 2),
    "max_restarts": 3,
    "out": "o",
    "resume": "auto",
    "global_batch_size": 8,
    "device": "cuda",
    "timeout": 20.0,
    "value": "host0:6379",
    "log_dir": "/logs",
}


def line(**asked: Any) -> str:
    return str(RayLauncher().plan(replace(SPEC, **asked)))


def test_a_sweep_has_a_driver_for_each_run() -> None:
    runs = {
        name: replace(SPEC, train=(f"{name}.yaml",), out=f"out/{name}", **NODES)
        for name in ("lr=1", "lr=2")
    }
    plan = RayLauncher().plan_sweep(runs)
    assert plan.waits
    [(file, text)] = plan.files.items()
    assert str(plan.commands[0]) == f"/py -m distcore_ray.sweep --address host0:1 {file}".replace(
        file, f"'{file}'"
    )
    sweep = json.loads(text)
    assert [run["log"] for run in sweep.values()] == ["out/lr=1.log", "out/lr=2.log"]
    for name, run in sweep.items():
        assert run["driver"] == list(RayLauncher().plan(runs[name]).commands[0].words[3:])


def test_the_plan_is_the_command_of_the_driver() -> None:
    assert (
        line()
        == "/py -m distcore_ray.driver --address auto --nodes 1:1 --nproc 2 --env NCCL_DEBUG=INFO"
        " --env 'A=b c' --patience 600 -- -m distcore train c.yaml --lr 0.1 --set nproc=auto"
    )
    assert (
        line(**ELASTIC)
        == "/py -m distcore_ray.driver --address host0:6379 --nodes 1:2 --nproc 2 --gpus"
        " --max-restarts 3 --env NCCL_DEBUG=INFO --env 'A=b c' --env DISTCORE_LOG_DIR=/logs"
        " --patience 20 -- -m distcore train c.yaml --lr 0.1 --set nproc=auto --set"
        " max_restarts=0"
    )


def test_the_driver_reads_what_the_plan_says() -> None:
    (command,) = RayLauncher().plan(replace(SPEC, **ELASTIC)).commands
    assert read_job(command.words[3:]) == RayJob(
        address="host0:6379",
        least=1,
        most=2,
        nproc=2,
        gpus=True,
        max_restarts=3,
        patience=20,
        variables={"NCCL_DEBUG": "INFO", "A": "b c", "DISTCORE_LOG_DIR": "/logs"},
        folder=os.getcwd(),
        words=(
            "-m",
            "distcore",
            "train",
            "c.yaml",
            "--lr",
            "0.1",
            "--set",
            "nproc=auto",
            "--set",
            "max_restarts=0",
        ),
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nproc": None}, r"^--launcher ray: say how many ranks each machine gets: --nproc N$"),
        (
            {"hosts": (Host(name="h", slots=1),)},
            r"^--launcher ray takes no --hostfile: Ray has its own nodes, and",
        ),
        ({"include": "h"}, r"^--launcher ray takes no --include: Ray has its own nodes"),
        (
            {"value": "host0"},
            r"^--launcher ray:host0: expected ray:HOST:PORT, the address of the head node$",
        ),
        (
            {"max_restarts": 1},
            r"^--max-restarts 1 starts ranks again, .*: add --out DIR --resume auto$",
        ),
        (
            {**ELASTIC, "global_batch_size": 6},
            r"^--nodes 1:2: global_batch_size = 6 cannot be shared by 2 \* 2 ranks",
        ),
    ],
)
def test_a_job_that_ray_cannot_start_is_one_line(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayLauncher().plan(replace(SPEC, **asked))


def test_a_missing_ray_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("distcore_ray.launcher.is_installed", lambda name: False)
    with pytest.raises(
        ConfigError, match=r"^--launcher ray: Ray is not installed: pip install ray"
    ):
        RayLauncher().run(RayLauncher().plan(SPEC))


def test_a_rank_joins_by_the_variables_of_torchrun_and_has_none_of_ray() -> None:
    assert rank_environment({"PATH": "/bin", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1"}) == {
        "PATH": "/bin"
    }
    assert variables_of(3, 2, 2, RankAddress("host0", "10.0.0.1", 4242)) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4242",
        "DISTCORE_LAUNCHER": "ray",
    }


def run(program: str, folder: Path) -> Rank:
    rank = Rank()
    assert rank.start(["-c", program], str(folder), {"LOCAL_WORLD_SIZE": "1", "WHO": "me"}) is None
    return rank


def test_lines_and_exit_status_of_a_rank_come_home(tmp_path: Path) -> None:
    rank = run(
        "import os, sys; print(os.environ['WHO']); print('no', file=sys.stderr); sys.exit(7)",
        tmp_path,
    )
    lines: list[tuple[str, str]] = []
    status = None
    while status is None:
        output = rank.listen(5)
        lines, status = [*lines, *output.lines], output.status
    assert (sorted(lines), status) == ([("stderr", "no\n"), ("stdout", "me\n")], 7)


def test_a_rank_is_asked_to_end_by_sigterm(tmp_path: Path) -> None:
    rank = run("import time; print('there', flush=True); time.sleep(100)", tmp_path)
    while not rank.listen(1).lines:
        pass
    rank.terminate()
    assert rank.listen(60).status == -signal.SIGTERM


def test_a_folder_that_a_node_does_not_have_is_one_line(tmp_path: Path) -> None:
    problem = Rank().start(["-c", ""], str(tmp_path / "none"), {"LOCAL_WORLD_SIZE": "1"})
    assert str(problem).endswith(f": {tmp_path}/none: No such file or directory")


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_rank_dies_with_its_actor() -> None:
    words = "['-c', 'import time; print(1, flush=True); time.sleep(100)']"
    program = (
        "from distcore_ray.actor import Rank; rank = Rank()\n"
        f"rank.start({words}, '.', {{'LOCAL_WORLD_SIZE': '1'}})\n"
        "while not rank.listen(1).lines: pass\n"
        "print(rank._process.pid, flush=True); input()"
    )
    actor = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert actor.stdout is not None
    child = psutil.Process(int(actor.stdout.readline()))
    actor.kill()
    actor.wait()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
