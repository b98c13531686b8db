"""``deterministic``: torch's own algorithms for the time of the run, and one line
where that is impossible.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from work_folder import install

from distcore import ConfigError, RunConfig, train
from distcore.cli.main import main
from distcore.distributed.arithmetic import WORKSPACE
from distcore.resolve.resolve import resolve
from distcore.testing import problem
from distcore.testing.problem import Problem

UNSTEADY = """
from distcore import Capabilities, World, hookimpl


class Unsteady:
    capabilities = Capabilities(spec_version=3, processes="one", deterministic=False)

    @hookimpl
    def setup(self, config, rank_info):
        raise AssertionError("no rank starts")
"""


@dataclass(frozen=True, kw_only=True)
class Watched(Problem):
    """The laws' problem; ``seen`` gets what is switched on while it trains, ``unpools``
    takes a forbidden operation.
    """

    seen: dict[str, Any]
    unpools: bool = False

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.seen.update(
            mode=torch.are_deterministic_algorithms_enabled(), workspace=os.environ.get(WORKSPACE)
        )
        if self.unpools:
            values, places = nn.functional.max_pool1d(torch.ones(1, 1, 4), 2, return_indices=True)
            nn.functional.max_unpool1d(values, places, [2])
        return super().loss(model, batch)


def run(out: Path, task: Watched, **changes: Any) -> None:
    shared = {
        "device": "cpu",
        "max_steps": 1,
        "global_batch_size": 4,
        "lr": 0.01,
        "extensions": {"progress": False},
    }
    train(RunConfig(out=str(out), **shared | changes), task)


def test_deterministic_algorithms_last_as_long_as_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    for asked, workspace in ((True, ":4096:8"), (False, None)):
        task = Watched(seen={})
        run(tmp_path / str(asked), task, deterministic=asked)
        assert task.seen == {"mode": asked, "workspace": workspace}
        assert not torch.are_deterministic_algorithms_enabled()
        assert WORKSPACE not in os.environ


def test_a_mode_that_the_program_had_switched_on_stays_on(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        run(tmp_path / "run", Watched(seen={}), deterministic=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_operation_without_such_an_algorithm_is_one_line(tmp_path: Path) -> None:
    run(tmp_path / "free", Watched(seen={}, unpools=True))
    with pytest.raises(
        ConfigError, match=r"^deterministic: max_unpool\w+ has no algorithm that repeats"
    ):
        run(tmp_path / "bound", Watched(seen={}, unpools=True), deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.needs("distcore-ddp")
def test_a_strategy_that_cannot_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    install(tmp_path, "unsteady", "[distcore.strategies]\nunsteady = unsteady:Unsteady\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RunConfig(strategy="unsteady", device="cpu", lr=0.1)
    assert resolve(config, task=Problem()).config.deterministic is False
    with pytest.raises(
        ConfigError, match=r"with these options does not repeat a run bit for bit; .*ddp.* could"
    ):
        resolve(config.model_copy(update={"deterministic": True}), task=Problem())


@pytest.mark.usefixtures("work_folder")
def test_the_flag_sets_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--task", f"{problem.__file__}:Problem", "--lr", "1", "--device", "cpu"]
    command += ["--deterministic", "--dry-run"]
    assert main(command) == 0
    assert "deterministic: true\n" in capsys.readouterr().out
