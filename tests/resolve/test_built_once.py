"""In one process a run's strategy and task are built once, whatever the job."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from distcore import registry
from distcore.cli.main import main

STRATEGY = """
import os
from dataclasses import dataclass
from {module} import {base}

@dataclass(frozen=True, kw_only=True)
class Counting({base}):
    def __post_init__(self):
        with open({log!r}, "a") as file:
            file.write(f"strategy {{os.getpid()}}\\n")
"""
TASK = """
import os
from dataclasses import dataclass
from distcore.testing.problem import Problem

@dataclass(frozen=True)
class Counted(Problem):
    def __post_init__(self):
        with open({log!r}, "a") as file:
            file.write(f"task {{os.getpid()}}\\n")
"""
DDP = ("distcore_ddp.strategy", "DDPStrategy")
SINGLE = ("distcore.strategies.single", "SingleStrategy")


def install_strategy(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, base: str) -> Path:
    """Put a distribution with the strategy ``counting``, and a task, into ``folder``; return the
    file they log to.
    """
    monkeypatch.delitem(sys.modules, "counting_strategy", raising=False)  # that of another test
    monkeypatch.syspath_prepend(str(folder))
    log = folder / "built.txt"
    (folder / "counting_strategy.py").write_text(
        STRATEGY.format(module=module, base=base, log=str(log))
    )
    (folder / "counted.py").write_text(TASK.format(log=str(log)))
    info = folder / "counting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[distcore.strategies]\ncounting = counting_strategy:Counting\n"
    )
    return log


def train(folder: Path, *flags: str) -> int:
    job = [
        "--task",
        f"{folder / 'counted.py'}:Counted",
        "--lr",
        "0.01",
        "--max-steps",
        "2",
        "--device",
        "cpu",
    ]
    batch = ["--global-batch-size", "8", "--out", str(folder / "run")]
    return main(["train", "--strategy", "counting", *job, *batch, *flags])


def built(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines())


@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=["dry-run", "train"])
def test_a_process_builds_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    log = install_strategy(tmp_path, monkeypatch, *SINGLE)
    assert "counting" in registry.offers("strategies")
    assert train(tmp_path, *flags) == 0
    assert sorted(built(log).values()) == [1, 1]


@pytest.mark.ranks
def test_each_rank_builds_strategy_and_task_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distcore_ddp")
    log = install_strategy(tmp_path, monkeypatch, *DDP)
    assert train(tmp_path, "--nproc", "2") == 0
    # strategy and task: in this process, and in two ranks
    assert list(built(log).values()) == [1] * 6
