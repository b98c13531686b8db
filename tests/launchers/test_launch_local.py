"""Ranks on this machine, as real processes: what they find, how they fail, how they are ended."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import destroy_process_group, group, is_initialized

from distcore import RankInfo, RunConfig, join_process_group
from distcore.errors import ConfigError, RankError
from distcore.launchers import launch
from distcore.launchers.processes import local, oom_kills
from distcore.launchers.processes.failures import Failure, culprit
from distcore.launchers.processes.rank import outliving_peers

SCRIPT = str(Path(__file__).parents[1] / "support/launch_cases.py")
DEADLINE = 90
CASES = {
    "raises": (
        "RankError",
        (
            r"^rank 1 of 2 failed: ValueError: boom with a second line; traceback in .*rank-1\.txt;"
            r" raised at .+\.py:\d+$"
        ),
    ),
    "killed": (
        "RankError",
        # Of memory it is spoken only where the kernel does not count the processes that it ends.
        r"^rank 1 of 2 failed: killed by SIGKILL"
        + (r" \(out of memory\?\)" if oom_kills() is None else "")
        + r"; details in .*rank-1\.txt$",
    ),
    "killed while another is busy": ("RankError", r"^rank 1 of 2 failed: killed by SIGKILL"),
    "crashes": ("RankError", r"^rank 1 of 2 failed: killed by SIGSEGV; details in .*rank-1\.txt$"),
    "exits": ("RankError", r"^rank 1 of 2 failed: exited with 7; traceback in"),
    "leaves": (
        "RankError",
        r"^rank 1 of 2 failed: exited with 0 before its work was done; traceback in",
    ),
    "raises, then tears down": (
        "RankError",
        r"^rank 1 of 2 failed: ValueError: boom; traceback in",
    ),
    "bad data": ("DataError", r"^rows\.json, row 3: expected \[text, label\]$"),
}


def run(
    *arguments: str, python: tuple[str, ...] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*python, SCRIPT, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE, env=environment
    )


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """Surroundings that two ranks report, started after OpenMP had threads in their parent."""
    done = run("look")
    assert (done.returncode, done.stderr) == (0, "")
    ranks: list[dict[str, Any]] = json.loads(done.stdout)
    return ranks


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each case ended, one launch after another in one process that says nothing itself."""
    done = run("failures", ";".join(CASES), str(tmp_path_factory.mktemp("errors")))
    assert (done.returncode, done.stderr) == (0, "")
    ends: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return ends


@pytest.mark.ranks
def test_ranks_find_their_place_and_their_arguments(seen: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(seen):
        assert (report["greeting"], report["world"]) == ("hello", 2)
        assert report["environment"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        assert "launcher='local'" in report["place"]


@pytest.mark.ranks
def test_ranks_leave_the_cores_to_each_other(seen: list[dict[str, Any]]) -> None:
    assert [(report["threads"], report["tokenizers"]) for report in seen] == [(1, "false")] * 2


@pytest.mark.ranks
def test_nobody_listens_beyond_this_machine(seen: list[dict[str, Any]]) -> None:
    assert [report["listening"] for report in seen] == [["127.0.0.1"]] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_a_failing_rank_ends_the_job_with_its_own_cause(
    case: str, failures: dict[str, dict[str, Any]]
) -> None:
    kind, text = CASES[case]
    assert failures[case]["class"] == kind
    assert re.search(text, failures[case]["text"])
    assert "\n" not in failures[case]["text"]


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_a_failing_rank_ends_the_job_within_five_seconds(
    case: str, failures: dict[str, dict[str, Any]]
) -> None:
    assert failures[case]["seconds"] < 5


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "evidence"),
    [
        ("raises", r"Traceback[\s\S]*raise ValueError[\s\S]*with a second line"),
        ("crashes", r"Fatal Python error: Segmentation fault"),
        ("killed", r"No traceback: killed by SIGKILL"),
    ],
)
def test_the_culprit_leaves_evidence_in_a_file(
    case: str, evidence: str, failures: dict[str, dict[str, Any]]
) -> None:
    assert re.search(evidence, failures[case]["files"]["rank-1.txt"])


@pytest.mark.ranks
def test_the_screen_gets_one_line() -> None:
    done = run("fail", "raises")
    assert done.returncode == 3
    assert re.fullmatch(
        r"error: rank 1 of 2 failed: ValueError: boom with a second line; .*\n", done.stderr
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "to_all", "status", "screen"),
    [
        (signal.SIGINT, True, 130, "interrupted\n"),
        (signal.SIGTERM, False, 143, ""),
        (signal.SIGKILL, False, -signal.SIGKILL, ""),
    ],
    ids=["Ctrl-C", "SIGTERM", "kill -9 of the launcher"],
)
def test_no_rank_outlives_the_launcher(
    number: signal.Signals, to_all: bool, status: int, screen: str
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, SCRIPT, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background jobs ignore Ctrl-C
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    ranks = psutil.Process(launcher.pid).children()
    (os.killpg if to_all else os.kill)(launcher.pid, number)
    _, errors = launcher.communicate(timeout=5)
    assert (launcher.returncode, errors) == (status, screen)
    assert psutil.wait_procs(ranks, timeout=3)[1] == []


@pytest.mark.ranks
def test_torchrun_ranks_join(tmp_path: Path) -> None:
    done = run("joined", "works", str(tmp_path), python=torchrun())
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"joined \d of \d", done.stdout)) == ["joined 0 of 2", "joined 1 of 2"]


@pytest.mark.ranks
def test_under_torchrun_only_the_culprit_speaks(tmp_path: Path) -> None:
    done = run("joined", "raises, then tears down", str(tmp_path), python=torchrun())
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    (line,) = ours
    file = f"{tmp_path}/rank-1.txt"
    assert re.fullmatch(
        rf"error: rank 1 of 2 failed: ValueError: boom; traceback in {file}; raised at"
        r" .+cases\.py:\d+",
        line,
    )
    assert "Traceback" in (tmp_path / "rank-1.txt").read_text()


@pytest.mark.ranks
@pytest.mark.needs("distcore-clusters")
def test_the_ranks_of_an_srun_step_meet(tmp_path: Path) -> None:
    assert srun("works", tmp_path) == [
        (0, "joined 0 of 2\n", ""),
        (0, "joined 1 of 2\n", ""),
    ]


@pytest.mark.ranks
@pytest.mark.needs("distcore-clusters")
def test_a_rank_whose_peer_vanished_says_so_where_no_launcher_does(tmp_path: Path) -> None:
    (status, _, errors), (killed, _, silence) = srun("killed", tmp_path)
    assert (killed, silence) == (-signal.SIGKILL, "")
    assert status == 3
    assert re.fullmatch(
        r"error: rank 0 of 2 failed: lost its peers: .*; traceback in .*/rank-0\.txt\n", errors
    )


def srun(case: str, errors: Path) -> list[tuple[int, str, str]]:
    """Start two processes with the environment of a step's tasks; status, stdout
    and stderr of each.
    """
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "OMP_NUM_THREADS": "1",
    }
    step |= {
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "joined", case, str(errors)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=DEADLINE) for task in tasks]
    return [(task.returncode, *output) for task, output in zip(tasks, outputs, strict=True)]


def torchrun() -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.ranks
def test_results_come_in_rank_order_from_any_callable() -> None:
    assert launch(lambda: os.environ["RANK"], nproc=3, timeout=60) == ["0", "1", "2"]


@pytest.mark.ranks
def test_ranks_can_be_spawned_where_forking_is_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "start_method", lambda: "spawn")
    assert launch(os.getenv, "LOCAL_RANK", nproc=2, timeout=60) == ["0", "1"]


def test_the_public_name_is_the_function() -> None:
    import distcore

    assert distcore.launch is launch


def lose_a_rank(folder: Path, how: str) -> None:
    """The last rank ends; the others take a while for what they save, and one that does not
    save waits for long.
    """
    if os.environ["RANK"] == "2":
        with outliving_peers():
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "none saves" or os.environ["RANK"] == "1":
        time.sleep(60)
    with outliving_peers():
        time.sleep(2.5)
        (folder / "saved").touch()


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["one saves", "none saves"])
def test_ranks_that_outlive_a_killed_one_get_the_time_to_save(tmp_path: Path, how: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 2 of 3 failed: killed by SIGKILL"):
        launch(partial(lose_a_rank, tmp_path, how), nproc=3, timeout=60)
    assert (tmp_path / "saved").exists() is (how == "one saves")
    assert time.monotonic() - began < 20  # nobody waits for the others


@pytest.mark.ranks
def test_a_job_over_its_time_limit_is_stopped() -> None:
    with pytest.raises(RankError, match=r"^1 rank\(s\) did not end within their time limit"):
        launch(signal.pause, nproc=1, timeout=0.5)


@pytest.mark.ranks
def test_ranks_do_not_inherit_the_group_that_a_failed_run_of_the_caller_left() -> None:
    join_process_group(RunConfig(device="cpu"), RankInfo())
    assert launch(is_initialized, nproc=2) == [False, False]
    assert not is_initialized()


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self, kept: object) -> None:
        self.itself, self.kept = self, kept


@pytest.mark.ranks
def test_ranks_do_not_free_a_group_that_is_garbage_of_the_caller() -> None:
    join_process_group(RunConfig(device="cpu"), RankInfo())
    gc.disable()
    try:
        Cycle(group.WORLD)
        destroy_process_group()
        # hangs in the destructor of the group, or crashes
        assert launch(gc.collect, nproc=2, timeout=60) != []
    finally:
        gc.enable()


@pytest.mark.ranks
def test_the_caller_gets_its_environment_back() -> None:
    before = dict(os.environ)
    handler = signal.getsignal(signal.SIGTERM)
    launch(os.getpid, nproc=1, timeout=60)
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == (before, handler)


@pytest.mark.parametrize("nproc", [0, -2])
def test_fewer_than_one_process_is_refused(nproc: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--nproc {nproc}: expected a number of processes, 1 or more$"
    ):
        launch(os.getpid, nproc=nproc)


def test_a_signal_outranks_an_error_and_an_error_a_lost_peer() -> None:
    lost = Failure(rank=0, kind="lost", cause="", when=1.0)
    error = Failure(rank=1, kind="error", cause="", when=2.0)
    late = Failure(rank=2, kind="error", cause="", when=3.0)
    killed = Failure(rank=3, kind="signal", cause="", when=4.0)
    assert culprit([lost, late, error]) is error
    assert culprit([lost, late, error, killed]) is killed


CRASH = """Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "{here}/mine.py", line 3 in watch

Thread 0x02 (most recent call first):
  File "/usr/lib/site-packages/torch/distributed/{collective}.py", line 4387 in all_gather_single
  File "/usr/lib/site-packages/torch/nn/modules/module.py", line 1811 in inner
  File "{here}/mine.py", line 10 in forward
  File "{ours}", line 37 in launch
"""


@pytest.mark.parametrize(("collective", "is_told"), [("distributed_c10d", True), ("run", False)])
def test_a_rank_that_a_backend_aborts_in_a_collective_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collective: str, is_told: bool
) -> None:
    """Such as where forward calls other sharded layers for the rows of one rank than
    for those of another.
    """
    monkeypatch.chdir(tmp_path)
    job: Any = SimpleNamespace(errors=tmp_path)
    text = CRASH.format(here=tmp_path, collective=collective, ours=local.__file__)
    (tmp_path / "rank-1.txt").write_text(text)
    cause = local._failure_from_exit_code(job, 1, -signal.SIGABRT).cause
    why = (
        " in a collective with other sizes than another rank had there at mine.py:10: what forward"
        " and loss call must"
    )
    assert cause.startswith("killed by SIGABRT" + why * is_told)
    assert local._failure_from_exit_code(job, 0, -signal.SIGABRT).cause == "killed by SIGABRT"


@pytest.mark.programs
def test_a_script_whose_launch_fails_ends_with_one_line() -> None:
    script = [sys.executable, "-c", "import os, distcore; distcore.launch(os.getpid, nproc=0)"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("ConfigError: nproc=0: expected a number of processes, 1 or more")
