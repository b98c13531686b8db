"""Masks follow from the row where they can; a resumed run keeps those of its checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distcore import ConfigError, RunConfig
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.resolve import dropout_masks as module
from distcore.resolve.dropout_masks import dropout_masks


def masks(
    compile_mode: str = "off", ranks_per_shard: int = 1, row_masks: bool = False, **settings: Any
) -> str:
    config = RunConfig.model_validate({"device": "cpu"} | settings)
    declared = Capabilities(spec_version=3, ranks_per_shard=ranks_per_shard, row_masks=row_masks)
    return dropout_masks(config, declared, compile_mode)


def test_masks_follow_from_the_row_on_a_cpu() -> None:
    assert masks() == "row"
    assert masks(dropout_masks="rank") == "rank"
    assert masks(device="cuda") == "rank"
    assert masks(device="cuda", dropout_masks="row") == "row"
    assert masks(ranks_per_shard=2, row_masks=True) == "row"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"compile_mode": "regions"}, "compiled code draws its own"),
        ({"ranks_per_shard": 2}, "strategy 'single' splits rows or layers over ranks"),
    ],
)
def test_masks_follow_from_the_rank_where_rows_cannot_have_their_own_and_the_wish_is_refused(
    settings: dict[str, Any], why: str
) -> None:
    assert masks(**settings) == "rank"
    with pytest.raises(ConfigError, match=f"^dropout_masks = 'row': {why}; leave it out$"):
        masks(**settings, dropout_masks="row")


@pytest.mark.parametrize(
    ("before", "settings", "chosen", "says"),
    [
        ({}, {}, "rank", ""),  # a checkpoint of before has masks by rank
        ({"dropout_masks": "row"}, {}, "row", ""),
        ({"dropout_masks": "row"}, {"device": "cuda"}, "row", ""),
        (
            {"dropout_masks": "row"},
            {"ranks_per_shard": 2},
            "rank",
            "rank, and row in the resumed checkpoint",
        ),
        ({}, {"dropout_masks": "row"}, "row", "row, and rank in the resumed checkpoint"),
    ],
)
def test_a_resumed_run_keeps_its_masks_or_says_that_they_change(
    before: dict[str, str],
    settings: dict[str, Any],
    chosen: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "find", lambda resume, out: Path("step-00000001"))
    monkeypatch.setattr(
        module, "Checkpoint", lambda path: SimpleNamespace(job_state=lambda: {"config": before})
    )
    with caplog.at_level(logging.INFO, "distcore"):
        assert masks(resume="auto", out="run", **settings) == chosen
    told = [record.getMessage() for record in caplog.records]
    assert told == ([f"dropout_masks: {says}: masks change from here on"] if says else [])
