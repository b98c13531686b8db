"""``--max-restarts``: a job whose rank died is started afresh from its newest checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from work_folder import write_rows

from distcore import checkpoint
from distcore.cli.main import main

FLAGS = (
    "--model bert-tiny --global-batch-size 8 --max-steps 30 --save-every 5 --seed 3 --set checkpoints.best=null "
    "--set extensions.progress=false --set device=cpu --strategy ddp --nproc 2"
)


def command(folder: Path, out: str, *more: str) -> list[str]:
    return ["train", "--data", str(write_rows(folder)), "--out", str(folder / out), *FLAGS.split(), *more]


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "distcore", *command(tmp_path, "killed", "--max-restarts", "2")]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("killed/checkpoints/step-*")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(psutil.Process(process.pid).children()[-1].pid, signal.SIGKILL)
    _, told = process.communicate(timeout=100)
    assert process.returncode == 0, told
    assert "failed: killed by SIGKILL" in told
    assert "; restart 1 of 2" in told
    assert main(command(tmp_path, "whole")) == 0
    last = "checkpoints/step-00000030"
    one, other = (checkpoint.read_tensors(tmp_path / out / last) for out in ("killed", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.needs("distcore-ddp")
def test_what_the_user_can_mend_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/config.yaml").write_text("")
    (tmp_path / "killed/checkpoints/step-00000001").mkdir(parents=True)
    assert main(command(tmp_path, "killed", "--max-restarts", "2")) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.programs
@pytest.mark.needs("distcore-ddp")
def test_under_another_launcher_that_one_restarts(tmp_path: Path) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    arguments = [sys.executable, "-m", "distcore", *command(tmp_path, "out", "--nproc", "1", "--max-restarts", "2")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "max_restarts = 2: torchrun started the ranks" in done.stderr
