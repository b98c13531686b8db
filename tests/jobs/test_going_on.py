"""A run that is stopped names the line that goes on; ``--resume auto`` without a config file
takes the run's own.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import yaml
from resume_job import wait_for

from distcore import RunConfig, checkpoint
from distcore.cli.main import main
from distcore.engine.fit import resume_command
from distcore.files import lock_shared
from distcore.launchers.processes.contexts import handle_stop_signals
from distcore.rank_environment.environment import LAUNCHER_FLAGS_VARIABLE, LAUNCHER_VARIABLE

pytestmark = pytest.mark.programs  # its runs are whole ones

STOP = """
import os, signal
from distcore import hookimpl

class Stop:
    @hookimpl
    def on_step_end(self, progress):
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
"""
SLOW = """
import time
from pathlib import Path
from distcore import hookimpl

class Slow:
    @hookimpl
    def on_step_end(self, progress):
        if progress.step == 2:
            Path("begun").touch()
            time.sleep(2)  # longer than two signals take
        time.sleep(0.2)
"""
JOB = (
    "train --data rows.json --model bert-tiny --lr 0.003 --global-batch-size 8 --max-steps 5"
    " --log-every 1 --set device=cpu"
)


def checkpoints(out: str) -> list[str]:
    return sorted(path.name for path in Path(out, "checkpoints").iterdir())


@pytest.fixture
def ctrl_c_heard() -> Iterator[None]:
    """As in a shell; a job in the background ignores Ctrl-C, and so do the tests in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_heard")
def test_ctrl_c_is_asked_once_and_then_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    with handle_stop_signals(asked.append):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == [signal.SIGINT]
    assert (
        capfd.readouterr().err
        == "\nstopping at the next log line or sooner; Ctrl-C again ends at once\n"
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "times"),
    [
        ("--strategy single", 1),
        ("--strategy single", 2),
        ("--strategy ddp --nproc 2", 1),
        pytest.param("--strategy ddp --nproc 2", 2, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_at_a_terminal(work_folder: Path, world: str, times: int) -> None:
    (work_folder / "slow.py").write_text(SLOW)
    arguments = [
        *JOB.split(),
        "--max-steps",
        "100",
        *world.split(),
        "--out",
        "run",
        "--log-every",
        "10",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "distcore", *arguments, "--set", "extensions.slow.py:Slow=true"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # a shell's background jobs ignore Ctrl-C
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(Path("begun").exists, process)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    _, told = process.communicate(timeout=60)
    assert "stopping at the next log line or sooner; Ctrl-C again ends at once\n" in told
    if times == 2:
        said = "interrupted; nothing was saved: run has no checkpoint yet"
        assert (process.returncode, told.splitlines()[-1]) == (130, said)
        assert not Path("run/checkpoints").exists()
        return
    assert process.returncode == 130, told
    step = int(checkpoints("run")[-1].removeprefix("step-"))
    assert step in ((2, 3) if "single" in world else (5,)), (
        "at once, or at the evaluation of the first epoch"
    )
    line = "distcore train run/config.yaml --out run --resume auto"
    assert told.splitlines()[-1] == f"stopped after step {step} of 100; go on with: {line}"


@pytest.fixture
def stopped(work_folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The last line of a run in the folder ``a run`` that got SIGTERM in its second step."""
    (work_folder / "stop.py").write_text(STOP)
    stops = ["--set", "extensions.stop.py:Stop=true", "--log-every", "100"]
    assert main([*JOB.split(), "--out", "a run", *stops]) == 143
    lines = capfd.readouterr().err.splitlines()
    assert lines.count("stopping at the next log line or sooner") == 1
    return lines[-1]


@pytest.mark.needs("distcore-tasks")
def test_the_line_that_a_stopped_run_ends_with_goes_on(stopped: str) -> None:
    text, _, line = stopped.partition("; go on with: ")
    assert text == "stopped after step 2 of 5"
    assert checkpoints("a run") == ["step-00000002"]
    program, *arguments = shlex.split(line)
    assert program == "distcore"
    assert main(arguments) == 0
    assert checkpoints("a run")[-1] == "step-00000005"


@pytest.mark.needs("distcore-tasks")
def test_a_run_that_another_process_trains_is_not_resumed(
    stopped: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distcore.resolve.run_folder.LINGERING", 0.3)
    again = ["train", "--out", "a run", "--resume", "auto"]
    with lock_shared(Path("a run/config.yaml")) or nullcontext():
        assert main(again) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert (
        said == "error: out = 'a run': another process is training this run; end it first, or wait"
        " for it"
    )
    assert checkpoints("a run") == ["step-00000002"]
    assert main(again) == 0


@pytest.mark.needs("distcore-tasks")
@pytest.mark.programs
def test_a_resume_without_a_config_file_takes_the_runs_own_under_the_flags_that_are_given(
    stopped: str,
) -> None:
    again = ["train", "--out", "a run", "--resume", "auto"]
    assert main([*again, "--keep-last", "7", "--save-every", "1"]) == 0
    assert checkpoints("a run") == [f"step-0000000{step}" for step in (2, 3, 4, 5)]
    config = yaml.safe_load(Path("a run/config.yaml").read_text())
    assert (config["lr"], config["checkpoints"]["keep_last"]) == (0.003, 7)


@pytest.mark.needs("distcore-ddp")
@pytest.mark.programs
def test_the_options_of_the_runs_strategy_are_not_given_to_another(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--strategy ddp --set strategy_options.bucket_mb=5"
    assert main([*JOB.split(), *options.split(), "--out", "run"]) == 0
    again = ["train", "--out", "run", "--resume", "auto", "--dry-run"]
    capsys.readouterr()
    assert main(again) == 0
    assert "bucket_mb: 5" in capsys.readouterr().out
    file = Path("run/config.yaml")
    file.write_text(file.read_text().replace("nproc: 1", "nproc: 2"))  # as if it had had two ranks
    assert main([*again, "--strategy", "single"]) == 0
    said = capsys.readouterr().out
    assert "strategy_options: {}" in said
    assert "nproc: 1" in said


@pytest.mark.needs("distcore-tasks")
@pytest.mark.programs
def test_a_config_file_that_is_given_counts_alone(
    stopped: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("other.yaml").write_text("lr: 0.25\nmodel: bert-tiny\ndata: rows.json\n")
    assert main(["train", "other.yaml", "--out", "a run", "--resume", "auto", "--dry-run"]) == 0
    assert "lr: 0.25" in capfd.readouterr().out


@pytest.mark.needs("distcore-tasks")
@pytest.mark.programs
def test_a_resume_without_a_checkpoint_says_so(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB.split(), "--out", "rnus", "--resume", "auto"]) == 0
    assert "\nno checkpoint in rnus: starting at step 0\n" in capsys.readouterr().err
    assert (
        checkpoint.Checkpoint(Path("rnus/checkpoints/step-00000005")).job_state()["progress"][
            "step"
        ]
        == 5
    )
    assert main([*JOB.split(), "--out", "fresh"]) == 0
    assert "no checkpoint in" not in capsys.readouterr().err


def test_the_launcher_that_started_the_ranks_is_named_and_an_object_has_no_command(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    config = RunConfig(out="runs/x")
    assert (
        resume_command(config)
        == "go on with: distcore train runs/x/config.yaml --out runs/x --resume auto"
    )
    assert (
        resume_command(config.model_copy(update={"task": "object:Mine"}))
        == "go on with resume='auto'"
    )
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
    }.items():
        monkeypatch.setenv(name, value)
    assert resume_command(config).startswith(
        "go on, under torchrun again, with: distcore train runs/x/config.yaml "
    )
    monkeypatch.setenv(LAUNCHER_FLAGS_VARIABLE, "--launcher ssh --hostfile hosts")
    assert (
        resume_command(config)
        == "go on with: distcore train runs/x/config.yaml --out runs/x --resume auto --launcher ssh"
        " --hostfile hosts"
    )
