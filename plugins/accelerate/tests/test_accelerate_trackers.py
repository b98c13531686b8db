"""Accelerate's trackers as an extension: what a tracker's own files hold after a run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcore import RunConfig, StrategyError, launch, load_config, train
from distcore.testing.problem import Problem
from distcore_accelerate.trackers import AccelerateTrackers

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def config(out: Path, strategy: str, nproc: int) -> RunConfig:
    trackers = {"log_with": "tensorboard", "project": "here"}
    return load_config(
        None,
        {
            "strategy": strategy,
            "nproc": nproc,
            "device": "cpu",
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "lr": 0.01,
            "max_steps": 4,
            "log_every": 1,
            "eval_every": 2,
            "out": str(out),
            "extensions": {"accelerate_trackers": trackers, "progress": False},
        },
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "nproc"), [("single", 1), ("accelerate", 2)])
def test_tensorboard_holds_every_logged_value_and_every_evaluation_once(
    tmp_path: Path, strategy: str, nproc: int
) -> None:
    launch(train, config(tmp_path / "run", strategy, nproc), Problem(), nproc=nproc)
    folder = tmp_path / "run" / "trackers" / "here"
    read: Any = events.EventAccumulator(str(folder))
    read.Reload()
    assert [event.step for event in read.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in read.Scalars("eval/accuracy")] == [2, 4]
    (values,) = folder.rglob("hparams.yml")
    kept = yaml.safe_load(values.read_text())
    assert (kept["strategy"], kept["global_batch_size"]) == (strategy, 8)


@pytest.mark.skipif(find_spec("comet_ml") is not None, reason="comet_ml is installed")
def test_a_tracker_that_is_not_installed_is_one_line() -> None:
    with pytest.raises(StrategyError, match=r"tracker 'comet_ml' is not installed; pip install it"):
        AccelerateTrackers(log_with="comet_ml")
