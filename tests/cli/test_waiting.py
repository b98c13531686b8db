"""Threads that wait sleep where other programs need the cores, and spin where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from distcore.cli import waiting


@pytest.mark.parametrize(
    ("used", "given", "policy"),
    [
        ([60.0, 0.0], {}, "passive"),
        ([20.0, 20.0], {}, None),
        ([60.0, 0.0], {"OMP_NUM_THREADS": "1"}, None),
        ([60.0, 0.0], {"GOMP_SPINCOUNT": "5"}, None),
        ([60.0, 0.0], {"OMP_WAIT_POLICY": "active"}, "active"),
        ([60.0, 0.0], {"RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
    ids=[
        "busy",
        "idle",
        "one thread",
        "chosen by count",
        "chosen by name",
        "a rank of another launcher",
    ],
)
def test_threads_sleep_on_a_busy_machine_unless_the_user_has_chosen(
    used: list[float], given: dict[str, str], policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: used)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    waiting.sleep_if_busy()
    assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_cores_of_other_processes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [100.0, 30.0, 100.0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1}, raising=False)
    assert waiting.cores_in_use() == 0.3


@pytest.mark.needs("distcore-tasks")
@pytest.mark.programs
@pytest.mark.parametrize("command", ["train --data none.json", "eval none"])
def test_the_way_to_wait_is_decided_before_torch_is_imported(command: str) -> None:
    code = (
        "import sys; from distcore.cli import waiting; from distcore.cli.main import main\n"
        "waiting.cores_in_use = lambda: print('torch' in sys.modules) or 0.0\n"
        "main(sys.argv[1:])"
    )
    left_open = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    program = [sys.executable, "-c", code, *command.split()]
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=left_open)
    assert done.stdout == "False\n"
