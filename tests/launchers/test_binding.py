"""Which cores are neighbors, and which of them a rank gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distcore.errors import ConfigError
from distcore.launchers.processes.binding import bind_cores, in_order, parse_cpus, share


def machine(folder: Path) -> Path:
    """A machine of two memory nodes, two cores in each, two threads in each core,
    numbered as Linux does.
    """
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        topology = folder / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    return folder


def test_threads_of_a_core_and_cores_of_a_node_are_neighbors(tmp_path: Path) -> None:
    assert in_order(set(range(8)), machine(tmp_path)) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_machine_without_a_topology_counts_as_one_socket(tmp_path: Path) -> None:
    assert in_order({3, 1, 2}, tmp_path) == [1, 2, 3]


def test_ranks_share_the_cores_equally_and_keep_to_a_node(tmp_path: Path) -> None:
    cpus = in_order(set(range(8)), machine(tmp_path))
    assert [share(cpus, rank, 2) for rank in range(2)] == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert share([0, 1, 2], 1, 2) == (1,)
    assert share([0], 1, 2) == ()


def test_linux_lists_are_read() -> None:
    assert parse_cpus("0-2,8\n") == [0, 1, 2, 8]
    assert parse_cpus("\n") == []


@pytest.mark.programs
def test_a_rank_keeps_to_its_cores_only_if_it_was_told_to() -> None:
    code = (
        "import os; from distcore.launchers.processes.binding import bind_cores;"
        "bind_cores(0, len(os.sched_getaffinity(0)));"
        "print(len(os.sched_getaffinity(0)))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "DISTCORE_BIND_CORES"}
    seen = [
        int(
            subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
            ).stdout
        )
        for env in (environ, {**environ, "DISTCORE_BIND_CORES": "all"})
    ]
    assert seen == [len(os.sched_getaffinity(0)), 1]


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores"
)
def test_ranks_share_the_cores_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(8)})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(sorted(cores)))
    monkeypatch.setenv("DISTCORE_BIND_CORES", "2-3,6-7,90")
    for rank in range(2):
        bind_cores(rank, 2)
    assert sorted(bound[0] + bound[1]) == [2, 3, 6, 7]  # type: ignore[operator]
    with pytest.raises(
        ConfigError, match=r"--bind-core-list 2-3,6-7,90: has 4 cores of this machine for 5 ranks"
    ):
        bind_cores(0, 5)


AFFINITY = """
import os
from distcore import hookimpl

class Affinity:
    @hookimpl
    def on_run_start(self, run, progress):
        print("cores of rank", run.world.rank, sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.programs
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores"
)
@pytest.mark.needs("distcore-tasks")
def test_a_run_of_one_rank_keeps_to_the_cores_of_a_list(work_folder: Path) -> None:
    (work_folder / "affinity.py").write_text(AFFINITY)
    last = max(os.sched_getaffinity(0))
    job = (
        "train --data rows.json --model bert-tiny --max-steps 1 --device cpu --bind-core-list"
        f" {last} --out run"
    )
    command = [
        sys.executable,
        "-m",
        "distcore",
        *job.split(),
        "--set",
        "extensions.affinity.py:Affinity=true",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert f"cores of rank 0 [{last}]" in done.stdout
