"""A run without a better evaluation for so long ends, with a report, and a resume knows how long it has waited."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from distcore import ConfigError, Report, RunConfig, train
from distcore.checkpoint import Checkpoint
from distcore.testing.problem import Problem

STANDS_STILL = 1e-30
"""Learning rate at which no evaluation is better than the first."""


def run(out: Path, **changes: Any) -> Report:
    config: dict[str, Any] = {
        "out": str(out), "lr": STANDS_STILL, "max_steps": 12, "eval_every": 2, "save_every": 2, "global_batch_size": 4,
        "device": "cpu", "patience": 2, "checkpoints": {"keep_last": 9}, "extensions": {"progress": False},
    }  # fmt: skip
    return train(RunConfig(**config | changes), Problem())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ended") / "run"
    report = run(out)
    assert report["steps"] == 6  # best at step 2, none better at 4 and 6
    return out


def test_it_ends_with_a_checkpoint_of_its_last_step(ended: Path) -> None:
    state = Checkpoint(ended / "checkpoints/step-00000006").job_state()
    assert (state["best"]["step"], state["best"]["waited"], state["total_steps"]) == (2, 2, 12)


@pytest.mark.programs
def test_a_resume_of_it_trains_no_further_unless_there_is_more_patience(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path / "run")
    assert run(tmp_path / "run", resume="auto")["steps"] == 6
    assert run(tmp_path / "run", resume="auto", patience=3)["steps"] == 8
    assert run(tmp_path / "run", resume="auto", patience=0)["steps"] == 12


def test_a_run_that_was_interrupted_ends_where_it_would_have(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000006")
    assert run(tmp_path / "run", resume="auto")["steps"] == 6


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_ranks_end_together(tmp_path: Path) -> None:
    assert run(tmp_path / "run", nproc=2, strategy="ddp")["steps"] == 6


def test_without_a_metric_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^patience = 2: needs a metric to judge by; name one by checkpoints.best$"):
        run(tmp_path / "run", checkpoints={"best": None})
