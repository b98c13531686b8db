"""The moving average of the weights is the same under every strategy, sharded as the weights are,
and goes from one strategy to the next.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import strategy_chain
import torch

from distcore import Progress, Report, Run, RunConfig, hookimpl, launch, train
from distcore.checkpoint import Tensors, read_tensors
from distcore.distributed.local_state import values_of
from distcore.testing.problem import Problem

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 6
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {},
    "fsdp hybrid": {"sharding": "hybrid", "shard_size": 1},
    "fsdp grad": {"sharding": "grad"},
    "deepspeed 0": {"stage": 0},
    "deepspeed 1": {"stage": 1},
    "deepspeed 2": {"stage": 2},
    "deepspeed 3": {"stage": 3},
    "horovod": {},
    "accelerate": {},
    "accelerate 3": {"backend": "deepspeed", "zero_stage": 3},
}
SHARDED = {"fsdp", "fsdp grad", "deepspeed 1", "deepspeed 2", "deepspeed 3", "accelerate 3"}
"""Where a rank holds half of the average. The master weights of DeepSpeed's stages 1
and 2 are sharded, too.
"""


class Held:
    """Writes how many elements of the average each rank holds, and of the
    weights that are trained.
    """

    @hookimpl
    def on_run_start(self, run: Run, progress: Progress) -> None:
        held = sum(value.numel() for part in (run.ema or {}).values() for value in values_of(part))
        (Path(str(run.config.out)) / f"held-{run.world.rank}").write_text(str(held))


def config(out: Path, **changes: Any) -> RunConfig:
    keys: dict[str, Any] = {
        "out": str(out),
        "lr": 1e-3,
        "max_steps": STEPS,
        "eval_every": 2,
        "global_batch_size": 8,
        "device": "cpu",
        "micro_batch_size": 2,
        "ema": {"decay": 0.6},
        "schedule": {"name": "constant"},
        "log_level": "error",
        "extensions": {"progress": False, f"{__file__}:Held": True},
    }
    return RunConfig(**keys | changes)


def solve(changes: RunConfig) -> Report:
    return train(changes, Problem())


def state(out: Path, step: int = STEPS) -> Tensors:
    return read_tensors(out / f"checkpoints/step-{step:08d}")


def evaluations(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["eval/loss"] for line in lines if "eval/loss" in line]


def assert_same(actual: Tensors, expected: Tensors) -> None:
    names = {name for name in expected if not name.startswith("optimizer/")}
    assert {name for name in actual if not name.startswith("optimizer/")} == names
    for name in names:
        assert (actual[name] - expected[name]).abs().max() <= 1e-6, name


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("single") / "run"
    solve(config(out))
    return out


@pytest.mark.parametrize("way", WAYS)
def test_the_average_is_that_of_one_process(way: str, single: Path, tmp_path: Path) -> None:
    name = way.partition(" ")[0]
    if not strategy_chain.is_offered(name):
        pytest.skip(f"{name} is not installed")
    out = tmp_path / "run"
    launch(partial(solve, config(out, strategy=name, strategy_options=WAYS[way], nproc=2)), nproc=2)
    assert_same(state(out), state(single))
    assert evaluations(out) == pytest.approx(evaluations(single), abs=1e-6)
    whole = int((single / "held-0").read_text())
    for rank in range(2):
        share = int((out / f"held-{rank}").read_text()) / whole
        assert math.isclose(share, 0.5, abs_tol=0.1) if way in SHARDED else share == 1


def test_the_average_goes_from_strategy_to_strategy(tmp_path: Path) -> None:
    chain = [way for way in ("ddp", "fsdp", "deepspeed 3", "horovod", "deepspeed 1", "accelerate")
             if strategy_chain.is_offered(way.partition(" ")[0])]  # fmt: skip
    for number, way in enumerate(chain, 1):
        going_on = {"resume": "auto", "resume_changed": ["total_steps"]} if number > 1 else {}
        keys = {
            "strategy": way.partition(" ")[0],
            "strategy_options": WAYS[way],
            "max_steps": 2 * number,
            "nproc": 2,
        }
        launch(partial(solve, config(tmp_path / "chain", **keys, **going_on)), nproc=2)
    solve(config(tmp_path / "single", max_steps=2 * len(chain)))
    assert_same(
        state(tmp_path / "chain", 2 * len(chain)), state(tmp_path / "single", 2 * len(chain))
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_16_bit_weights_train_on_as_if_the_average_had_never_taken_their_place(
    stage: int, tmp_path: Path
) -> None:
    if not strategy_chain.is_offered("deepspeed"):
        pytest.skip("deepspeed is not installed")
    ways = {
        "strategy": "deepspeed",
        "strategy_options": {"stage": stage},
        "nproc": 2,
        "precision": "bf16",
    }
    for name, ema in {"averaged": {"decay": 0.6}, "raw": {}}.items():
        launch(partial(solve, config(tmp_path / name, **ways, ema=ema)), nproc=2)
    expected = state(tmp_path / "raw")
    assert all(
        torch.equal(value, state(tmp_path / "averaged")[name]) for name, value in expected.items()
    )
    assert evaluations(tmp_path / "averaged") != evaluations(tmp_path / "raw")
