"""What ``distcore plan`` says of states is what ranks hold, to the byte, and what they send."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distcore import Memory, RankInfo, RunConfig, launch, load_config
from distcore.engine.resolve import resolve
from distcore.launchers import join
from distcore.planning.plan import make_plan
from distcore.planning.request import Request
from distcore.testing.store import store_for

ROOT = Path(__file__).parents[2]
RANKS = 2
SHARDED = tuple(f"deepspeed:{stage}" for stage in (1, 2, 3))
ROWS = ("ddp", "fsdp:full", "fsdp:grad", "deepspeed:0", *SHARDED, "accelerate", "horovod")
OTHER = 2**14
"""Bytes of what a plan leaves out: buffers of the model, and the batch."""
Found = dict[str, dict[str, Any]]


def benchmark() -> ModuleType:
    """The benchmark that counts the bytes of every tensor that lives when the optimizer is about to step."""
    name = "held_memory"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks/memory_and_traffic.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # its dataclass looks its module up by name
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def in_turn(configs: list[RunConfig], folder: str) -> list[dict[str, Any]]:
    """What each rank does: train under one strategy after the other, and count."""
    found = []
    for turn, config in enumerate(configs):
        with store_for(turn, Path(folder), join() or RankInfo(), seconds=60):
            found.append(benchmark().rank(config))
    return found


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the first rank holds and sends, by strategy; the ranks are started once."""
    folder = tmp_path_factory.mktemp("held")
    configs = [
        resolve(load_config(None, {
            "strategy": name, "strategy_options": benchmark().ROWS[name].options, "nproc": RANKS, "device": "cpu",
            "model": "bert-tiny", "max_steps": 3, "max_seq_len": 32, "micro_batch_size": 4, "data_guard_steps": 0,
            "global_batch_size": 4 * RANKS, "log_level": "error", "out": str(folder / name),
        }))
        for name in ROWS
    ]  # fmt: skip
    return dict(zip(ROWS, launch(in_turn, configs, str(folder), nproc=RANKS)[0], strict=True))


def planned(name: str) -> Memory:
    changes: dict[str, Any] = {"model": "bert-tiny", "strategy": name.partition(":")[0]}
    changes |= {f"strategy_options.{key}": value for key, value in benchmark().ROWS[name].options.items()}
    (row,) = make_plan(Request(config=None, changes=changes, strategies=name, ranks=[RANKS])).rows
    assert row.memory is not None, row.reason
    return row.memory


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ROWS)
def test_states_are_what_a_rank_holds(name: str, held: Found) -> None:
    found, plan = held[name], planned(name)
    assert found["parameters"] == plan.parameters
    assert found["optimizer"] == plan.optimizer
    if name in SHARDED:  # gradients, master weights and the bucket are buffers of its own
        kept, stated = found["gradients"] + found["other"], plan.gradients + plan.copies
        assert kept >= stated
        if name == "deepspeed:3":
            assert kept - stated - plan.buffers < OTHER
        else:  # a gradient that the end of a shard cuts lives whole; here it is the largest of all
            assert kept == pytest.approx(stated + plan.buffers, rel=0.2)
    else:
        assert found["gradients"] == plan.gradients
        assert plan.copies == 0
        assert found["other"] < OTHER
    if benchmark().ROWS[name].sent is not None:
        assert benchmark().sent(found) * 4 * found["count"] == pytest.approx(plan.sent + plan.sent_each, rel=1e-3)
