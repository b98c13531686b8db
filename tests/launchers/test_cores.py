"""How many threads a rank gets, and what is said where ranks or other programs share the cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil
import pytest
import torch

from distcore import RunConfig
from distcore.cli.main import main
from distcore.launchers.processes import cores
from distcore.launchers.processes.cores import cgroup_quota


@pytest.mark.parametrize(
    ("given", "ranks", "threads"), [("3", 2, 3), ("4,2", 1, 4), ("", 2, 4), ("", 3, 2), ("", 64, 1)]
)
def test_ranks_share_the_cores_unless_the_user_has_chosen(
    given: str, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    assert cores.threads_per_rank(ranks) == threads


def test_a_single_process_computes_with_no_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "available_cores", lambda: 3)
    before = torch.get_num_threads()
    try:
        for threads, kept in ((8, 3), (2, 2)):
            torch.set_num_threads(threads)
            cores.keep_to_cores()
            assert torch.get_num_threads() == kept
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/user/job/cpu.max": "400000 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/one\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
    ],
    ids=[
        "no cgroup",
        "no controller",
        "no limit",
        "version 2",
        "the group above has less",
        "version 1",
    ],
)
def test_a_quota_counts_as_that_many_cores(
    files: dict[str, str], quota: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_quota(tmp_path) == quota


@pytest.mark.needs("distcore-tasks")
def test_ranks_that_outnumber_the_cores_are_warned_of_with_a_remedy(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 5)
    job = (
        "train --data rows.json --model bert-tiny --strategy ddp --set device=cpu --dry-run --nproc"
    )
    said = (
        "nproc = 16 on 5 core(s): ranks take turns on them, and each step waits for the last one;"
        " --nproc 4 gives"
    )
    assert main([*job.split(), "16"]) == 0
    out = capsys.readouterr().out
    assert f"# warning: {said}" in out
    assert "# threads: 1 per rank; this machine has " in out
    assert main([*job.split(), "4"]) == 0
    assert "core(s): ranks take turns" not in capsys.readouterr().out
    assert cores.crowding_warning(RunConfig(nproc=16, device="cuda")) is None


@pytest.mark.needs("distcore-workbench")
def test_a_comparison_on_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from distcore_workbench.compare.comparison import warnings_of
    from distcore_workbench.compare.foreign_load import foreign_load

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.9, 9.0, 9.0))
    assert foreign_load() is None
    assert not list(warnings_of([], None))
    monkeypatch.setattr(psutil, "getloadavg", lambda: (1.1, 0.0, 0.0))
    (warning,) = warnings_of([], foreign_load())
    assert warning.startswith(
        "load average 1.1 on 4 core(s): other programs are at work here, or just were"
    )
