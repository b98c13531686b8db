"""``distcore train --sweep``: several settings, one run after the other, and the table
of all of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from text_task import TEXTS
from work_folder import STRANGERS, enter, write_rows

from distcore.cli.main import main
from distcore_workbench.compare.sweep_space import axes_of, combinations

JOB = (
    f"train --task {TEXTS} --data rows.json --model bert-tiny --max-steps 20 --log-every 1 --set"
    " device=cpu --out lr"
)
SWEEP = [*JOB.split(), "--set", "extensions.slow.py:Slow=true", "--sweep", "lr=1e-4,1e-3"]
SLOW = """
import time
from distcore import hookimpl

class Slow:
    @hookimpl
    def on_step_end(self, run):
        time.sleep(0.05)
        if run.config.lr > 1e-4: raise ValueError("no luck")
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A sweep that got SIGTERM in its first run: its folder, its exit code and
    what it said last.
    """
    folder = tmp_path_factory.mktemp("sweep")
    write_rows(folder)
    (folder / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "distcore", *SWEEP]
    own = {"DISTCORE_CACHE": str(folder / "cache"), "DISTCORE_BLOCK_PLUGINS": STRANGERS}
    with subprocess.Popen(
        command, cwd=folder, env=os.environ | own, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (folder / "lr/lr=0.0001/metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    return folder, process.returncode, told.splitlines()[-1]


@pytest.mark.programs
def test_sigterm_ends_the_sweep_and_the_same_command_goes_on(
    stopped: tuple[Path, int, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, code, last = stopped
    assert code == 143
    assert re.fullmatch(
        r"sweep stopped in lr=0.0001; go on with: .* train .* --sweep lr=1e-4,1e-3", last
    )
    enter(folder, monkeypatch)
    assert not Path("lr/lr=0.001").exists()

    assert main(SWEEP) == 3  # what the second run ends with
    out, err = capfd.readouterr()
    (since,) = re.findall(r"resumed from lr/lr=0.0001/checkpoints/step-0*(\d+)", err)
    assert re.findall(r"^run \d of 2: .*", err, re.M) == [
        "run 1 of 2: lr=0.0001",
        "run 2 of 2: lr=0.001",
    ]
    steps = [
        json.loads(line)["step"]
        for line in Path("lr/lr=0.0001/metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == [*range(1, 21)]
    assert "no luck" in err
    heading, first, second, *notes = out[out.index("run  ") :].splitlines()
    assert re.match(r"run +lr +loss ↓ +accuracy ↑ +samples/s ", heading)
    assert re.match(r"lr=0.0001 +0.0001 +\d", first)
    assert re.match(r"lr=0.001 +0.001 +n/a ", second)
    assert notes[0].startswith(
        f"lr=0.0001: was resumed at step {since}; its speed, seconds and memory are of the steps"
    )
    assert notes[1:3] == [
        "lr=0.001: not finished, it has no report.json",
        "lr=0.001: failed with exit code 3",
    ]

    assert main([*SWEEP[:-1], "lr=1e-4"]) == 0
    out, err = capfd.readouterr()
    assert "run 1 of 1: lr=0.0001: finished already\n" in err
    assert out[out.index("run  ") :].splitlines()[1].split()[1:4] == first.split()[2:5]

    assert main([*SWEEP, "--dry-run"]) == 0
    assert (
        capfd.readouterr().out
        == "lr=0.0001: finished, in lr/lr=0.0001\nlr=0.001: to train, in lr/lr=0.001\n"
    )
    assert main([*SWEEP, "--seed", "3"]) == 2
    assert (
        capfd.readouterr().err
        == "error: run lr/lr=0.0001: is there with seed = 0, now it is 3; choose another --out\n"
    )


def test_two_sweeps_make_a_grid_and_name_its_folders() -> None:
    settings = combinations(
        axes_of(["lr=1e-4,0.001", "optimizer.betas=[0.9,0.98],[0.9,0.999]"], {})
    )
    assert list(settings.values())[1] == {"lr": 1e-4, "optimizer.betas": [0.9, 0.999]}
    assert list(settings) == [
        "lr=0.0001,optimizer.betas=-0.9,0.98-",
        "lr=0.0001,optimizer.betas=-0.9,0.999-",
        "lr=0.001,optimizer.betas=-0.9,0.98-",
        "lr=0.001,optimizer.betas=-0.9,0.999-",
    ]
    assert list(combinations(axes_of(["model=bert-tiny,org/model"], {}))) == [
        "model=bert-tiny",
        "model=org-model",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sweep lr", "--sweep lr: expected KEY=VALUE,VALUE, such as --sweep lr=1e-4,3e-4"),
        ("--sweep lrr=1,2", "command line: unknown key 'lrr' .did you mean 'lr'"),
        ("--sweep lr=1e-4,-1", "command line: lr = -1: must be greater than 0"),
        ("--sweep lr=1e-4,0.0001", "--sweep: lr=0.0001 is there twice; name each value once"),
        ("--sweep lr=1e-4 --lr 1", "--sweep lr=1e-4: lr is set twice; keep one of them"),
        ("--sweep lr=1 --sweep lr=2", "--sweep lr=2: lr is set twice"),
        ("--sweep model=bert-tiny", "--sweep model=bert-tiny: model is set twice"),
        ("--sweep out=a,b", "--sweep out=a,b: each run of a sweep has its own out"),
        ("--sweep seed=1 --resume auto", "--sweep: goes on by itself .*; leave out --resume"),
        (
            "--sweep seed=1 --out taken",
            "--out taken: holds a run; a sweep needs a folder of its own",
        ),
        ("--sweep max_seq_len=16,2", "run max_seq_len=2: task .*max_seq_len = 2"),
        (
            "--lr 0.001 0.003",
            "--lr 0.001 0.003: takes one value; for a run with each: --sweep lr=0.001,0.003",
        ),
        (
            "--lr 0.001 0.003 job.yaml",
            "--lr 0.001 0.003: takes one value; .* --sweep lr=0.001,0.003",
        ),
        (
            "--dropout 0 0.1 --seed 3",
            "--dropout 0 0.1: takes one value; for a run with each: --sweep dropout=0,0.1",
        ),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line_before_the_first_run(
    work_folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (work_folder / "taken").mkdir()
    (work_folder / "taken/config.yaml").write_text("lr: 1")
    assert main([*JOB.split(), *arguments.split()]) == 2
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)
    assert not (work_folder / "lr").exists()


def test_a_value_before_the_config_file_is_one_value(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "job.yaml").write_text("epochs: 2")
    assert main([*JOB.split(), "--lr", "0.001", "job.yaml", "--dry-run"]) == 0
    assert "lr: 0.001\n" in capsys.readouterr().out
