"""Which errors of ranks are a want of memory."""

from __future__ import annotations

import pytest

from distcore.launchers import Failure
from distcore_workbench.planning import memory_errors


def test_a_rank_whose_peer_the_kernel_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((3, 3, 4))
    monkeypatch.setattr(memory_errors, "oom_kills", lambda: next(kills))
    explain = memory_errors.explainer_in_a_rank(None, {})
    lost = Failure(rank=0, kind="lost", cause="lost its peers: connection closed", when=0.0)
    assert explain(lost) == ""
    assert explain(lost).startswith("; the kernel ended a process of this machine, which was out of memory: ")


def test_other_errors_stay_as_they_are() -> None:
    explain = memory_errors.explainer_in_a_rank(None, {})
    assert explain(Failure(rank=0, kind="error", cause="ZeroDivisionError: division by zero", when=0.0)) == ""
    said = "no strategy named 'memory' or out of memory"
    assert explain(Failure(rank=0, kind="error", cause=said, when=0.0, raised="StrategyError")) == ""
