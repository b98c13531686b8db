"""A resume that draws other dropout masks says so in one line."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from distcore import RunConfig, train
from distcore.checkpoint import Checkpoint, read_tensors
from distcore.checkpoint.job_state import changed_masks, saved_config
from distcore.config.loading import with_changes
from distcore.testing.problem import Problem
from distcore.testing.reference import largest_difference


def run(out: Path, dropout: float = 0.2, **changes: Any) -> None:
    given = {
        "out": str(out),
        "max_steps": 1,
        "global_batch_size": 8,
        "lr": 0.01,
        "device": "cpu",
        "resume": "auto",
    }
    given |= {"extensions": {"progress": False}, "dropout_masks": "rank", "micro_batch_size": 8}
    train(RunConfig.model_validate(given | changes), Problem(dropout=dropout))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"micro_batch_size": 4}, "micro_batch_size was 8 and is 4"),
        ({"micro_batch_size": 4, "dropout": 0.0}, ""),
        ({"loader": {"forward_tokens": 3}}, "loader.forward_tokens was 96 and is 3"),
        ({"dropout_masks": "row", "micro_batch_size": 4}, ""),
    ],
)
def test_the_change_of_the_masks_is_named(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {key: value for key, value in changes.items() if key in ("dropout", "dropout_masks")}
    run(tmp_path, **kept)
    with caplog.at_level(logging.INFO, "distcore"):
        run(tmp_path, **changes)
    line = (
        f"resume: {said}: dropout masks change from here on, as they follow from ranks and"
        " micro-batches"
    )
    assert [text for text in caplog.messages if text.startswith("resume: ")] == (
        [line] if said else []
    )


def test_options_of_another_strategy_are_no_reason(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "checkpoints/step-00000001"
    state = Checkpoint(path).job_state()
    config = saved_config(state, path)
    now = with_changes(
        config, {"strategy": "ddp", "strategy_options": {"bucket_mb": 5}, "micro_batch_size": 4}
    )
    other: Any = SimpleNamespace(config=now, module=nn.Dropout(0.2))
    assert changed_masks(other, state, path) == "micro_batch_size was 8 and is 4"


@pytest.mark.programs
@pytest.mark.parametrize("masks", ["row", "rank"])
def test_a_run_that_goes_on_keeps_its_masks_until_its_end(masks: str, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"max_steps": 3, "save_every": 1, "checkpoints": {"keep_last": 9}}
    run(tmp_path / "whole", **steps, dropout_masks=masks)
    for before, name, step in (("whole", "on", 1), ("on", "again", 2)):
        resumed = str(tmp_path / before / f"checkpoints/step-{step:08d}")
        run(tmp_path / name, **steps, dropout_masks="auto", resume=resumed)
    run(tmp_path / "other", **steps, dropout_masks="rank" if masks == "row" else "row")
    whole, again, other = (
        read_tensors(tmp_path / name / "checkpoints/step-00000003")
        for name in ("whole", "again", "other")
    )
    assert largest_difference(again, whole)[0] == 0
    assert largest_difference(other, whole)[0] > 0
