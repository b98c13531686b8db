"""Which errors of ranks are a want of memory."""

from __future__ import annotations

from functools import partial

import pytest

from distcore import RankError, RunConfig
from distcore.launchers import Failure
from distcore_workbench.planning import memory_errors


def test_a_rank_whose_peer_the_kernel_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((3, 3, 4))
    monkeypatch.setattr(memory_errors, "oom_kills", lambda: next(kills))
    explain = memory_errors.explainer_in_a_rank(None, {})
    lost = Failure(rank=0, kind="lost", cause="lost its peers: connection closed", when=0.0)
    assert explain(lost) == ""
    assert explain(lost).startswith(
        "; the kernel ended a process of this machine, which was out of memory: "
    )


def test_errors_that_are_not_of_memory_stay_as_they_are() -> None:
    explain = memory_errors.explainer_in_a_rank(None, {})
    assert (
        explain(
            Failure(rank=0, kind="error", cause="ZeroDivisionError: division by zero", when=0.0)
        )
        == ""
    )
    said = "no strategy named 'memory' or out of memory"
    assert (
        explain(Failure(rank=0, kind="error", cause=said, when=0.0, raised="StrategyError")) == ""
    )


def test_a_rank_that_the_kernel_has_not_ended_is_no_want_of_memory() -> None:
    said = (
        "killed by SIGKILL; details in rank-1.txt; the kernel ended no process .* go on with --out"
        " runs/mine and --resume auto"
    )
    read = partial(RunConfig, out="runs/mine")
    with pytest.raises(RankError, match=said), memory_errors.explain_out_of_memory(None, {}, read):
        raise RankError("rank 1 of 2 failed: killed by SIGKILL; details in rank-1.txt")
