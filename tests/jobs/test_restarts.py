"""``--max-restarts``: a job whose rank died is started afresh from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from work_folder import write_rows

from distcore import checkpoint
from distcore.cli.main import main

FLAGS = (
    "--model bert-tiny --global-batch-size 8 --max-steps 30 --save-every 5 --seed 3 --set"
    " checkpoints.best=null --set extensions.progress=false --set device=cpu --strategy ddp"
    " --nproc 2"
)


def command(folder: Path, out: str, *more: str) -> list[str]:
    return [
        "train",
        "--data",
        str(write_rows(folder)),
        "--out",
        str(folder / out),
        *FLAGS.split(),
        *more,
    ]


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [
        sys.executable,
        "-m",
        "distcore",
        *command(tmp_path, "killed", "--max-restarts", "2"),
    ]
    process = subprocess.Popen(
        arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )
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


DIES = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
import torch
import distcore

@dataclass(frozen=True, kw_only=True)
class Dies(distcore.Simple):
    how: str = ""
    when: str = "before"
    once: str = ""

    def data(self):
        x = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
        rows = torch.utils.data.TensorDataset(x, x.sum(1))
        return rows, torch.utils.data.Subset(rows, range(8))

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def row_loss(self, model, batch):
        is_eighth = torch.is_grad_enabled() and len(CALLS) == 7
        is_first = os.environ.get("RANK") == "1" and not Path(self.once).exists()
        dying = is_eighth and is_first and self.how
        if dying:
            Path(self.once).touch()
            if self.how == "raises":
                raise ValueError("a bad row")
            if self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.when == "forward":
                model[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        CALLS.extend([0] * torch.is_grad_enabled())
        losses = (model(batch[0])[:, 0] - batch[1]) ** 2
        if self.when == "backward" and dying:
            losses.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return losses

CALLS = []
"""


def dies(
    folder: Path,
    strategy: str,
    how: str,
    launcher: Sequence[str] = ("-m", "distcore"),
    nproc: int = 2,
    when: str = "before",
) -> str:
    """Train twice, once with a rank that ends in step 8; compare the last weights, and
    return what was said.
    """
    (folder / "dies.py").write_text(DIES)
    flags = (
        f"--task dies.py:Dies --strategy {strategy} --global-batch-size 16 --epochs 1 --save-every"
        " 5 --eval-every 3"
    )
    flags += " --keep-last 9"
    said = ""
    for out, more in (
        ("whole", ""),
        ("killed", f"--how {how} {when and f'--when {when}'} --once {folder}/once --resume auto"),
    ):
        ranks = f"--nproc {nproc} --max-restarts 1" if launcher == ("-m", "distcore") else ""
        words = [sys.executable, *launcher, "train", *f"{flags} --out {out} {ranks} {more}".split()]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = done.stderr
    one, other = (
        checkpoint.read_tensors(folder / out / "checkpoints/step-00000020")
        for out in ("killed", "whole")
    )
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in other)
    return said


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_the_rank_that_is_left_saves_the_step_before(tmp_path: Path) -> None:
    said = dies(tmp_path, "ddp", "killed")
    assert "W rank 0: other ranks are gone: step 7 is saved from memory" in said
    assert "resumed from killed/checkpoints/step-00000007 at step 7" in said
    state = json.loads((tmp_path / "killed/checkpoints/step-00000007/state.json").read_text())
    assert state["best"]["step"] in (3, 6)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["accelerate", "horovod", "ddp:torchrun"])
def test_the_rank_that_is_left_saves_under_other_strategies_and_launchers(
    tmp_path: Path, strategy: str
) -> None:
    name, _, launcher = strategy.partition(":")
    agent = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
        "distcore",
    )
    assert "at step 7" in dies(tmp_path, name, "killed", agent if launcher else ("-m", "distcore"))


@pytest.mark.needs("distcore-mesh", "distcore-fsdp")
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "when"),
    [
        ("mesh:shard=2", "before"),
        ("mesh:shard=2", "backward"),
        # A rank of the first shards is left with a gathered layer; those of the replicas save.
        (
            'fsdp:hybrid --set strategy_options.shard_size=2 --set strategy_options.wrap=["2"]',
            "forward",
        ),
    ],
)
def test_ranks_that_hold_replicas_of_all_shards_save_together(
    tmp_path: Path, strategy: str, when: str
) -> None:
    said = dies(tmp_path, strategy, "killed", nproc=4, when=when)
    assert "ranks are gone: step 7 is saved from memory" in said
    assert "resumed from killed/checkpoints/step-00000007 at step 7" in said


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "how"), [("fsdp", "killed"), ("ddp", "raises")])
def test_a_job_that_cannot_be_saved_from_memory_goes_on_from_the_disk(
    tmp_path: Path, strategy: str, how: str
) -> None:
    said = dies(tmp_path, strategy, how)
    assert "is saved from the memory" not in said
    assert "at step 7" not in said


@pytest.mark.needs("distcore-ddp")
def test_an_error_that_the_user_can_mend_is_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/config.yaml").write_text("")
    (tmp_path / "killed/checkpoints/step-00000001").mkdir(parents=True)
    assert main(command(tmp_path, "killed", "--max-restarts", "2")) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.programs
@pytest.mark.needs("distcore-ddp")
def test_max_restarts_is_refused_under_another_launcher(tmp_path: Path) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    arguments = [
        sys.executable,
        "-m",
        "distcore",
        *command(tmp_path, "out", "--nproc", "1", "--max-restarts", "2"),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "max_restarts = 2: torchrun started the ranks" in done.stderr
