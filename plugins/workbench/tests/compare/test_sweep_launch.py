"""A sweep whose runs a launcher starts; ``tests/machines`` has SLURM and Ray themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from text_task import TEXTS

from distcore.cli.main import main

JOB = (
    f"train --task {TEXTS} --data rows.json --model bert-tiny --max-steps 2 --set device=cpu --out"
    " lr --strategy ddp"
)
FLAGS = "--launcher torchrun --nproc 2 --log-dir logs"
RANGE = ["--sweep", "lr=1e-4..1e-2 log", "--trials", "3"]


@pytest.mark.programs
@pytest.mark.usefixtures("work_folder")
def test_the_plan_of_a_grid_has_each_run_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lr/lr=0.001").mkdir(parents=True)
    Path("lr/lr=0.001/report.json").touch()
    grid = "--sweep lr=1e-4,1e-3,1e-2 --launcher slurm --nproc 1 --dry-run"
    assert main([*JOB.split(), *grid.split()]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^lr=(\S+): (\w+)", said, re.M) == [
        ("0.0001", "to"),
        ("0.001", "finished"),
        ("0.01", "to"),
    ]
    assert "#SBATCH --array=0-1\n" in said
    file = Path("lr/configs/lr=0.01.yaml").absolute()
    assert f" -m distcore train {file} --out lr/lr=0.01 --set nproc=auto --resume auto ;;\n" in said
    assert not Path("lr/configs").exists()


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.usefixtures("work_folder")
def test_trials_that_are_drawn_at_once_are_those_that_are_drawn_in_turn(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("optuna")
    command = [*JOB.split(), *RANGE, "--sampler", "random", "--nproc", "1"]
    assert main([*command, "--launcher", "slurm", "--dry-run"]) == 0
    planned = re.findall(r"--out lr/(lr=\S+)", capfd.readouterr().out)
    assert main([*command, "--max-steps", "1"]) == 0
    trials = json.loads(Path("lr/trials.json").read_text())["trials"]
    assert [trial["run"] for trial in trials] == planned
    assert main([*command, "--max-steps", "1", "--launcher", "slurm", "--dry-run"]) == 0
    assert "sbatch" not in capfd.readouterr().out  # all have ended


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("work_folder")
def test_a_launcher_that_waits_starts_one_run_after_the_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("optuna")
    command = [*JOB.split(), *RANGE, *FLAGS.split()]
    assert main(command) == 0
    runs = sorted(path.name for path in Path("lr").glob("lr=*"))
    assert len(runs) == 3
    assert all(
        json.loads(Path("lr", run, "report.json").read_text())["world_size"] == 2 for run in runs
    )
    assert sorted(path.name for path in Path("logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert "best: lr=" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--launcher slurm --nproc 1",
            (
                "--sweep: --launcher slurm --nproc 1 does not wait for the end of a run; trials"
                " that depend on others cannot start; give --sampler random, or start this inside"
                " an allocation"
            ),
        ),
        (
            "--launcher slurm --sampler random",
            "--launcher slurm: say how many ranks each machine gets: --nproc N",
        ),
        (
            "--launcher kubernetes:job,image=i --nproc 1 --sampler random",
            (
                "--sweep: --launcher kubernetes:job,image=i --nproc 1 does not wait for the end of"
                " a run; start each run by itself"
            ),
        ),
        ("--launcher ray:x --nproc 1 --sampler random", "--launcher ray:x: expected ray:HOST:PORT"),
    ],
)
@pytest.mark.usefixtures("work_folder")
def test_a_sweep_that_cannot_be_launched_is_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    assert main([*JOB.split(), *RANGE, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not Path("lr").exists()
