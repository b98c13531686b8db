"""Ranks of another launcher that die for want of memory say what the job needs, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import too_little

from distcore.cli import out_of_memory as exhausted
from distcore.launchers.processes import failures
from distcore.launchers.processes.failures import Failure


@pytest.mark.slow  # the plan has 25 seconds, too few for its imports on a machine full of other tests
@pytest.mark.ranks
@pytest.mark.programs
def test_a_rank_of_torchrun_under_a_limit_says_what_the_plan_would_have_said(work_folder: Path) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m distcore"
    job = "train --strategy ddp --data rows.json --task own.py:Own --model bert-tiny --max-steps 1 --set device=cpu"
    _, lines = too_little.run(work_folder, f"{torchrun} {job} --out run")
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1, lines
    assert "can't allocate memory" in said[0]
    assert "; the plan needs " in said[0]
    assert too_little.SAID in said[0]


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
