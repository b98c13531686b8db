"""The line about a killed rank speaks of memory only where memory may have been the cause."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from distcore.launchers.processes import local, memory_kills, oom_kills


def test_the_count_is_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(memory_kills, "VMSTAT", vmstat)
    assert oom_kills() is None
    vmstat.write_text("pgfault 7\noom_kill 3\nunevictable_pgs_scanned 0\n")
    assert oom_kills() == 3
    vmstat.write_text("pgfault 7\n")
    assert oom_kills() is None


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        (3, 3, "killed by SIGKILL"),
        (3, 4, "killed by SIGKILL (out of memory?)"),
        (None, None, "killed by SIGKILL (out of memory?)"),
    ],
    ids=["the kernel ended none", "it ended one", "it does not count"],
)
def test_a_killed_rank(
    before: int | None,
    after: int | None,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "oom_kills", lambda: after)
    job = local._Launch(
        entry=lambda: None,
        nproc=2,
        errors=tmp_path,
        records=tmp_path,
        deadline=0.0,
        stop=threading.Event(),
        signals=[],
        grace_period=0.0,
        oom_kills_before=before,
    )
    assert local._failure_from_exit_code(job, 1, -signal.SIGKILL).cause == cause
