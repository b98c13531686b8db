"""Ranks of another launcher that die for want of memory say what the job needs, too."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from distcore.cli import exhausted
from distcore.launchers import failures
from distcore.launchers.failures import Failure

LIMIT = 2 * 2**30


@pytest.mark.slow  # the plan has 25 seconds, too few for its imports on a machine full of other tests
@pytest.mark.ranks
@pytest.mark.programs
def test_a_rank_of_torchrun_under_a_limit_says_what_the_plan_would_have_said(work_folder: Path) -> None:
    (work_folder / "own.py").write_text(
        "import torch\n"
        "from distcore.tasks.text_classification.task import TextClassification\n"
        "class Own(TextClassification):\n"
        "    def build_model(self, config, data):\n"
        "        model = super().build_model(config, data)\n"
        "        model.more = torch.nn.Linear(24000, 24000)  # 2.3 GB in one block\n"
        "        return model\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m distcore"
    job = "train --strategy ddp --data rows.json --task own.py:Own --model bert-tiny --max-steps 1 --set device=cpu"
    done = subprocess.run(
        [sys.executable, *torchrun.split(), *job.split(), "--out", "run"], preexec_fn=limit, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert "can't allocate memory" in said[0]
    assert "; the plan needs " in said[0]
    assert "2.00 GiB are available; next: a strategy that shards parameters" in said[0]


def test_a_rank_whose_peer_the_kernel_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((3, 3, 4))
    monkeypatch.setattr(failures, "oom_kills", lambda: next(kills))
    explain = exhausted.in_a_rank(None, {})
    lost = Failure(rank=0, kind="lost", cause="lost its peers: connection closed", when=0.0)
    assert explain(lost) == ""
    assert explain(lost).startswith("; the kernel has ended a process of this machine for want of memory: ")


def test_other_errors_stay_as_they_are() -> None:
    explain = exhausted.in_a_rank(None, {})
    assert explain(Failure(rank=0, kind="error", cause="ZeroDivisionError: division by zero", when=0.0)) == ""
    said = "no strategy named 'memory' or out of memory"
    assert explain(Failure(rank=0, kind="error", cause=said, when=0.0, raised="StrategyError")) == ""
