"""Each option of each strategy with accumulation, clipping, a moving average, LoRA,
and a resume elsewhere.

A run under the option equals one process, and its checkpoint goes on under another strategy,
and in one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from sentences import Sentences
from strategy_chain import is_offered, losses

from distcore import RankInfo, RunConfig, launch, train
from distcore.checkpoint import read_tensors
from distcore.rank_environment.environment import join
from distcore.testing.findings import BF16, FP32
from distcore.testing.reference import largest_difference
from distcore.testing.store import store_for

pytestmark = pytest.mark.ranks

FOLDER = TemporaryDirectory(prefix="matrix-")
"""Where all launches train."""
STEPS, HALF = 6, 3
"""Optimizer steps of a run, and those before its checkpoint."""
LORA: dict[str, Any] = {"lora": {"rank": 2, "targets": ["up_proj", "down_proj"]}}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy with options."""

    options: dict[str, Any]
    """Its options."""
    blocks: int = 2
    """Blocks of the model."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes to the config, also for one process."""
    bound: float = FP32
    """Largest relative distance from one process: of a law in the precision of the run."""
    adapts: bool = True
    """True if the strategy trains adapters with the option."""
    quick: bool = False
    """True if the row is measured in every test."""
    alone: bool = False
    """True if the row needs ranks of its own."""


BF16_RUN: dict[str, Any] = {"changes": {"precision": "bf16"}, "bound": BF16}
ROUNDED: dict[str, Any] = {"bound": BF16}
JSON = {"zero_optimization": {"stage": 2, "overlap_comm": False}}
ROWS: dict[str, dict[str, Row]] = {
    "ddp": {
        "bucket_mb": Row(options={"bucket_mb": 0}),
        "static_graph": Row(options={"static_graph": True}, quick=True),
        "find_unused": Row(options={"find_unused": True}),
        "compression": Row(options={"compression": "bf16"}, **ROUNDED),
        "compression, static graph": Row(
            options={"compression": "fp16", "static_graph": True}, **ROUNDED
        ),
    },
    "fsdp": {
        "grad": Row(options={"sharding": "grad", "forward_prefetch": 1}),
        "none": Row(options={"sharding": "none"}),
        "hybrid": Row(options={"sharding": "hybrid", "shard_size": 1}, quick=True),
        "wrap": Row(options={"wrap": ["model.embed_tokens", "model.layers.*"]}),
        "wrap by size": Row(options={"wrap": 100}),
        "prefetch": Row(options={"forward_prefetch": 1, "backward_prefetch": 2}),
        "recomputed": Row(options={"activation_checkpointing": True}),
        "recomputed every second": Row(options={"activation_checkpointing": 2, "sharding": "grad"}),
        "recomputed but products": Row(
            options={"activation_checkpointing": "products"}, quick=True
        ),
        "param_dtype": Row(options={"param_dtype": "precision"}, **BF16_RUN),
        "reduce_dtype": Row(options={"reduce_dtype": "precision"}, **BF16_RUN),
    },
    "mesh": {
        "tp": Row(options={"tp": 2}, quick=True),
        "tp, recomputed": Row(options={"tp": 2, "activation_checkpointing": True}),
        "sequence_parallel": Row(
            options={"tp": 2, "sequence_parallel": True}, adapts=False, quick=True
        ),
        "loss_parallel": Row(options={"tp": 2, "loss_parallel": True}),
        "sequence_parallel, loss_parallel": Row(
            options={"tp": 2, "sequence_parallel": True, "loss_parallel": True}, adapts=False
        ),
        "cp": Row(options={"cp": 2}),
        "replicate": Row(options={"replicate": 2}),
        "shard": Row(options={"shard": 2, "activation_checkpointing": "products"}),
        "pp": Row(options={"pp": 2}, adapts=False, quick=True),
        "pp, recomputed": Row(options={"pp": 2, "activation_checkpointing": True}, adapts=False),
        "gpipe": Row(options={"pp": 2, "pp_schedule": "gpipe"}, adapts=False),
        "interleaved": Row(options={"pp": 2, "pp_schedule": "interleaved"}, blocks=4, adapts=False),
        "pp_chunks": Row(
            options={"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 3}, blocks=6, adapts=False
        ),
        "param_dtype": Row(options={"param_dtype": "precision"}, **BF16_RUN),
        "reduce_dtype": Row(options={"reduce_dtype": "precision"}, **BF16_RUN),
    },
    "horovod": {
        "average": Row(options={"op": "average"}),
        "compression": Row(options={"compression": "fp16"}, **ROUNDED),
        "groups": Row(options={"groups": 4}, quick=True),
        "no groups": Row(options={"groups": 0, "cycle_ms": 5}),
        # Horovod crashes if a process sets it up once more, without a buffer.
        "fusion_mb": Row(options={"fusion_mb": 0}, adapts=False, alone=True),
        "find_unused": Row(options={"find_unused": True}),
    },
    "accelerate": {
        "bucket_mb": Row(options={"bucket_mb": 0}, quick=True),
        "find_unused": Row(options={"find_unused": True}),
        "zero 0": Row(options={"backend": "deepspeed", "zero_stage": 0}),
        "zero 1": Row(options={"backend": "deepspeed", "zero_stage": 1}),
        "zero 3": Row(options={"backend": "deepspeed", "zero_stage": 3}),
        "json": Row(options={"backend": "deepspeed", "deepspeed_config": JSON}),
    },
    "deepspeed": {
        "round robin": Row(options={"stage": 1, "round_robin_gradients": True}),
        "offload": Row(options={"stage": 2, "offload_optimizer": "cpu"}),
        "secondary partitions": Row(
            options={"stage": 3, "config": {"zero_optimization": {"zero_hpz_partition_size": 2}}}
        ),
    },
}
"""By strategy and name. ``fsdp``'s ``cpu_offload`` and Accelerate's
``fsdp2`` need an accelerator.
"""


def config(out: Path, row: Row, lora: bool, **changes: Any) -> RunConfig:
    """Return the config of a run with two micro-batches on each of two ranks."""
    keys: dict[str, Any] = {
        "out": str(out),
        "device": "cpu",
        "lr": 0.01,
        "max_steps": STEPS,
        "save_every": HALF,
        "eval_every": HALF,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "clip": {"norm": 0.05},
        "ema": {"decay": 0.6},
        "log_every": 1,
        "optimizer": {"eps": 1e-2, "weight_decay": 0.1},
        "schedule": {"name": "linear", "warmup_steps": 2},
        "log_level": "error",
        "extensions": {"progress": False},
    }
    return RunConfig.model_validate(keys | row.changes | (LORA if lora else {}) | changes)


def other_than(strategy: str) -> str:
    """Return the strategy under which a checkpoint goes on."""
    return "ddp" if strategy == "fsdp" else "fsdp"


def train_each(folder: Path, strategy: str, rows: Mapping[tuple[str, bool], Row]) -> None:
    """Train each row in this rank, then go on from its first checkpoint under another strategy."""
    rank_info = join(os.environ) or RankInfo()
    turn = 0
    for (name, lora), row in rows.items():
        place = folder_of(folder, name, lora)
        checkpoint = place / f"run/checkpoints/step-{HALF:08d}"
        runs: dict[str, dict[str, Any]] = {
            "run": {"strategy": strategy, "strategy_options": row.options},
            "elsewhere": {"strategy": other_than(strategy), "resume": str(checkpoint)},
        }
        for out, keys in runs.items():
            with store_for(turn, folder, rank_info, 60):
                train(config(place / out, row, lora, nproc=2, **keys), Sentences(blocks=row.blocks))
            turn += 1


def folder_of(folder: Path, name: str, lora: bool) -> Path:
    return folder / f"{name.replace(' ', '-')}{'-lora' if lora else ''}"


def launch_of(name: str, row: Row) -> str:
    """Return the launch that trains a row."""
    return name if row.alone else "quick" if row.quick else "slow"


@cache
def trained(strategy: str, launched: str) -> Path:
    """Train the rows of a strategy that a launch trains, and return the folder of their runs."""
    folder = Path(mkdtemp(dir=FOLDER.name))
    rows = {
        (name, lora): row
        for name, row in ROWS[strategy].items()
        for lora in (False, True)
        if launch_of(name, row) == launched and (row.adapts or not lora)
    }
    launch(train_each, folder, strategy, rows, nproc=2)
    return folder


def distance(actual: Path, expected: Path, after: int = 0) -> float:
    """Return the largest relative distance of losses and of final tensors, those of
    the moving average included.
    """
    mine, right = losses(actual), losses(expected)
    assert sorted(mine) == list(range(after + 1, STEPS + 1))
    worst = max(abs(mine[step] - right[step]) / abs(right[step]) for step in mine)
    states = [
        read_tensors(folder / f"checkpoints/step-{STEPS:08d}") for folder in (actual, expected)
    ]
    held, whole = (
        {name: state[name] for name in state if not name.startswith("optimizer/")}
        for state in states
    )
    assert held.keys() == whole.keys()
    return max(worst, largest_difference(held, whole)[0])


CASES = [
    pytest.param(strategy, name, lora, marks=() if row.quick else pytest.mark.slow)
    for strategy, rows in ROWS.items()
    for name, row in rows.items()
    for lora in (False, True)
    if row.adapts or not lora
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "name", "lora"), CASES)
def test_a_run_with_the_option_is_that_of_one_process_and_goes_on_elsewhere(
    strategy: str, name: str, lora: bool, tmp_path: Path
) -> None:
    if not is_offered(strategy):
        pytest.skip(f"{strategy} is not installed")
    row = ROWS[strategy][name]
    place = folder_of(trained(strategy, launch_of(name, row)), name, lora)
    train(config(tmp_path / "single", row, lora), Sentences(blocks=row.blocks))
    checkpoint = place / f"run/checkpoints/step-{HALF:08d}"
    train(
        config(tmp_path / "alone", row, lora, resume=str(checkpoint)), Sentences(blocks=row.blocks)
    )
    assert distance(place / "run", tmp_path / "single") <= row.bound
    assert distance(place / "elsewhere", tmp_path / "single", after=HALF) <= row.bound
    assert distance(tmp_path / "alone", tmp_path / "single", after=HALF) <= row.bound
