"""Ranks hold the states that ``distcore plan`` states, to the byte, and send as much as it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distcore import Memory, RankInfo, RunConfig, launch, load_config
from distcore.rank_environment import join
from distcore.resolve.resolve import resolve
from distcore.testing.store import store_for
from distcore_workbench.planning.plan import make_plan
from distcore_workbench.planning.request import PlanRequest

ROOT = Path(__file__).parents[2]
RANKS = 2
SHARDED = tuple(f"deepspeed:{stage}" for stage in (1, 2, 3))
ROWS = ("ddp", "fsdp:full", "fsdp:grad", "deepspeed:0", *SHARDED, "accelerate", "horovod")
OTHER = 2**14
"""Bytes of what a plan leaves out: buffers of the model, and the batch."""
Figures = dict[str, dict[str, Any]]
PIPELINES = ("mesh:pp=2,shard=2", "mesh:pp=2,tp=2", "mesh:pp=2,pp_schedule=interleaved,replicate=2")
"""Each on four ranks, two to a place in the pipeline."""


def benchmark() -> ModuleType:
    """The benchmark that counts the bytes of every tensor that lives when the optimizer
    is about to step.
    """
    name = "held_memory"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, ROOT / "benchmarks/memory_and_traffic.py"
        )
        assert spec is not None
        assert spec.loader is not None
        # its dataclass looks its module up by name
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def in_turn(configs: list[RunConfig], folder: str) -> list[dict[str, Any]]:
    """On each rank: train under one strategy after the other, and count."""
    figures = []
    for turn, config in enumerate(configs):
        with store_for(turn, Path(folder), join() or RankInfo(), seconds=60):
            figures.append(benchmark().rank(config))
    return figures


def measured(
    rows: dict[str, dict[str, Any]], folder: Path, ranks: int, model: str
) -> list[Figures]:
    """Bytes that each rank holds and sends, by strategy, of ranks started once.
    ``rows`` are strategies' options.
    """
    configs = [
        resolve(
            load_config(
                None,
                {
                    "strategy": name,
                    "strategy_options": options,
                    "nproc": ranks,
                    "device": "cpu",
                    "model": model,
                    "max_steps": 3,
                    "max_seq_len": 32,
                    "micro_batch_size": 4,
                    "data_guard_steps": 0,
                    "global_batch_size": 4 * ranks,
                    "log_level": "error",
                    "out": str(folder / name),
                },
            )
        ).config
        for name, options in rows.items()
    ]
    return [
        dict(zip(rows, each, strict=True))
        for each in launch(in_turn, configs, str(folder), nproc=ranks)
    ]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Bytes that the first of two ranks holds and sends, by strategy."""
    rows = {name: benchmark().ROWS[name].options for name in ROWS}
    return measured(rows, tmp_path_factory.mktemp("held"), RANKS, "bert-tiny")[0]


def planned(
    name: str, options: dict[str, Any], ranks: int = RANKS, model: str = "bert-tiny"
) -> Memory:
    changes: dict[str, Any] = {"model": model, "strategy": name.partition(":")[0]}
    changes |= {f"strategy_options.{key}": value for key, value in options.items()}
    (row,) = make_plan(
        PlanRequest(config=None, changes=changes, strategies=name, ranks=[ranks])
    ).rows
    assert row.memory is not None, row.reason
    return row.memory


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ROWS)
def test_states_are_what_a_rank_holds(name: str, held: Figures) -> None:
    figures, plan = held[name], planned(name, benchmark().ROWS[name].options)
    assert figures["parameters"] == plan.parameters
    assert figures["optimizer"] == plan.optimizer
    if name in SHARDED:  # gradients, master weights and the bucket are buffers of its own
        kept, stated = figures["gradients"] + figures["other"], plan.gradients + plan.copies
        assert kept >= stated
        if name == "deepspeed:3":
            assert kept - stated - plan.buffers < OTHER
        else:  # a gradient that the end of a shard cuts lives whole; here it is the largest of all
            assert kept == pytest.approx(stated + plan.buffers, rel=0.2)
    else:
        assert figures["gradients"] == plan.gradients
        assert plan.copies == 0
        assert figures["other"] < OTHER
    if benchmark().ROWS[name].sent is not None:
        assert plan.sent is not None
        assert benchmark().sent(figures) * 4 * figures["count"] == pytest.approx(
            plan.sent + plan.sent_each, rel=1e-3
        )


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_states_of_a_pipeline_are_those_of_the_stage_that_needs_most(tmp_path: Path) -> None:
    stages = measured({name: {} for name in PIPELINES}, tmp_path, 4, "bert-mini")
    for name in PIPELINES:
        plan = planned(name, {}, 4, "bert-mini")
        held = {
            kind: [rank[name][kind] for rank in stages]
            for kind in ("parameters", "gradients", "optimizer")
        }
        assert {kind: max(sizes) for kind, sizes in held.items()} == {
            kind: getattr(plan, kind) for kind in held
        }, name
        assert len(set(held["parameters"])) > 1, name  # the head is smaller than the embeddings
