"""A sharded model is saved where it lies: ranks write their parts in parallel, in bounded
files, and gather nothing.
"""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from distcore import Run, RunConfig, hookimpl, launch, registry
from distcore.checkpoint import save
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.plugin.strategy.contract import Progress, RankInfo
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import Datasets
from distcore.rank_environment import export, join
from distcore.resolve import strategies
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Unsynced
from distcore.testing.problem import CLASSES, VOCABULARY, Problem

pytestmark = pytest.mark.ranks

MIB = 2**20
WIDTH, LAYERS, LIMIT = 1024, 8, 4 * MIB
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
"""Bytes of the layers that matter; the moments take twice as many."""
SHARDED = {"fsdp": {"sharding": "full"}, "deepspeed": {"stage": 3}}


class Wide(Problem):
    """Eight layers of 4 MiB."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        return Pooled(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))


class Pooled(nn.Sequential):
    def forward(self, tokens: Tensor) -> Tensor:
        first, *rest = self
        hidden: Tensor = first(tokens).mean(1)
        for layer in rest:
            hidden = layer(hidden)
        return hidden


class Gathers:
    """An extension with which every rank gathers the whole state: what
    must not happen unnoticed.
    """

    @hookimpl(wrapper=True)
    def save_checkpoint(self, run: Run) -> Any:
        state = yield
        sharded = {
            n: p
            for n, p in run.module.named_parameters()
            if f"model/{n}" in state and hasattr(p, "full_tensor")
        }
        return state | {
            f"model/{name}": parameter.full_tensor().detach() for name, parameter in sharded.items()
        }


def peak() -> int:
    """Bytes: the most memory since it was last forgotten."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def train_and_save(strategy: str, folder: Path, extensions: dict[str, object]) -> int:
    """In each rank: train a step and save; how many bytes more than before that took."""
    rank_info = join() or RankInfo()
    export(rank_info)
    given: dict[str, Any] = {
        "max_steps": 1,
        "global_batch_size": 4,
        "lr": 0.01,
        "device": "cpu",
        "timeout": 60,
    }
    config = RunConfig(strategy=strategy, strategy_options=SHARDED[strategy], nproc=2, **given)
    task = Wide()
    config = resolve(config, rank_info.size, rank_info.launcher, task=task).config
    hooks = Hooks(strategy, strategies.load_strategy(config).plugin, extensions)
    world = hooks.setup(config, rank_info)
    run = build_run(config, hooks, world, task, data := task.prepare(config))
    list(steps(run, hooks, task, data.train, Progress()))
    gc.collect()  # or what dies meanwhile makes room
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = peak()
    save(run, hooks, Progress(step=1), folder, {"best": None}, Unsynced(), LIMIT)
    grown = peak() - before
    del run
    hooks.teardown(world)
    return grown


@pytest.mark.parametrize("strategy", SHARDED)
def test_each_rank_writes_its_half_and_holds_no_more(strategy: str, tmp_path: Path) -> None:
    if strategy not in registry.offers("strategies"):
        pytest.skip(f"{strategy} is not installed")
    grown = launch(partial(train_and_save, strategy, tmp_path, {}), nproc=2, timeout=120)
    files = list(tmp_path.glob("step-*/*.safetensors"))
    shares = [
        sum(file.stat().st_size for file in files if f"-0000{rank}-" in file.name)
        for rank in range(2)
    ]
    assert sum(shares) > 3 * WEIGHTS
    assert max(shares) < 0.52 * sum(shares)
    assert max(file.stat().st_size for file in files) < LIMIT + 4096
    assert max(grown) < WEIGHTS / 2


def test_a_rank_that_gathers_would_be_noticed(tmp_path: Path) -> None:
    pytest.importorskip("distcore_fsdp")
    grown = launch(
        partial(train_and_save, "fsdp", tmp_path, {"gathers": Gathers()}), nproc=2, timeout=120
    )
    assert max(grown) > WEIGHTS / 2
