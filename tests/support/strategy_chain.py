"""Continue one run under several strategies, and compare it with a run of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from distcore import RunConfig, StrategyError, launch, registry, train

WAYS = ("ddp", "fsdp", "deepspeed:3", "horovod", "accelerate")
STEPS = 2
"""Steps of each strategy."""


def is_offered(way: str) -> bool:
    """Return True if the strategy and its library are installed; Horovod must also be built."""
    name = way.partition(":")[0]
    if name not in registry.offers("strategies"):
        return False
    try:
        registry.load("strategies", name)
    except StrategyError:
        return False
    return True


def options_of(way: str) -> dict[str, Any]:
    name, _, stage = way.partition(":")
    return {"strategy": name, "strategy_options": {"stage": int(stage)} if stage else {}}


def run_chain(folder: Path, config: Callable[..., RunConfig], ways: Sequence[str] = WAYS) -> None:
    """Train in ``folder`` on two ranks, each of ``ways`` that is there going on where the
    one before it stopped.

    ``config`` makes the config of a run, with the keys that it is given.
    """
    for number, way in enumerate(filter(is_offered, ways), 1):
        going_on = {"resume": "auto", "resume_changed": ["total_steps"]} if number > 1 else {}
        run = {"out": str(folder), "nproc": 2, "max_steps": STEPS * number}
        launch(train, config(**options_of(way), **run, **going_on), nproc=2)


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def assert_one_run(chain: Path, whole: Path, ways: Sequence[str] = WAYS) -> None:
    """Assert that the chain has each step once, with the loss of the run in ``whole``."""
    actual, expected = losses(chain), losses(whole)
    assert sorted(actual) == list(range(1, STEPS * len(list(filter(is_offered, ways))) + 1))
    for step, loss in actual.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), f"step {step}"


def generated(folder: Path) -> list[str]:
    return [
        json.loads(line)["generated"]
        for line in (folder / "predictions.jsonl").read_text().splitlines()
    ]
