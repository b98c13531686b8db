"""What ``distcore plan`` says of states is what ranks hold, to the byte, and what they send."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distcore import Memory
from distcore.planning.plan import Request, make_plan

ROOT = Path(__file__).parents[2]
MODEL = "bert-tiny"
RANKS = 2
ROWS = ["single", "ddp", "fsdp:full", "fsdp:grad", "deepspeed:1", "deepspeed:2", "deepspeed:3"]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """The benchmark that counts the bytes of every tensor that lives when the optimizer is about to step."""
    spec = importlib.util.spec_from_file_location("held_memory", ROOT / "benchmarks/memory_and_traffic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up by name
    spec.loader.exec_module(module)
    return module


def planned(name: str, options: dict[str, object]) -> Memory:
    changes: dict[str, Any] = {"model": MODEL, "device": "cpu", "strategy": name.partition(":")[0]}
    changes |= {f"strategy_options.{key}": value for key, value in options.items()}
    request = Request(config=None, changes=changes, strategies=name, ranks=[RANKS])
    (row,) = make_plan(request).rows
    assert row.memory is not None, row.reason
    return row.memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_states_are_what_a_rank_holds(name: str, benchmark: ModuleType) -> None:
    row = benchmark.ROWS[name]
    found = benchmark.measure(row, RANKS, 1, MODEL)
    plan = planned(name, row.options)
    assert found["parameters"] == plan.parameters
    assert found["optimizer"] == plan.optimizer
    if name.startswith("deepspeed"):
        # Its gradients and master weights are in buffers of its own, among others of some kilobytes; at stages 1 and 2
        # a gradient at the end of a shard lives whole.
        kept = found["gradients"] + found["other"]
        assert kept == pytest.approx(plan.gradients + plan.copies, rel=benchmark.TOLERANCE)
    else:
        assert found["gradients"] == plan.gradients
        assert plan.copies == 0
    assert benchmark.sent(found) * 4 * found["count"] == pytest.approx(plan.sent + plan.sent_each, rel=0.01)
