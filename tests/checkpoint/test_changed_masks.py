"""A resume that draws other dropout masks says so in one line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from distcore import RunConfig, train
from distcore.testing.problem import Problem


def run(out: Path, dropout: float = 0.2, **changes: Any) -> None:
    given = {"out": str(out), "max_steps": 1, "global_batch_size": 8, "lr": 0.01, "device": "cpu", "resume": "auto"}
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
def test_what_changes_them_is_named(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {key: value for key, value in changes.items() if key in ("dropout", "dropout_masks")}
    run(tmp_path, **kept)
    with caplog.at_level(logging.INFO, "distcore"):
        run(tmp_path, **changes)
    line = f"resume: {said}: dropout masks change from here on, as they follow from ranks and micro-batches"
    assert [text for text in caplog.messages if text.startswith("resume: ")] == ([line] if said else [])
