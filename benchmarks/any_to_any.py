"""Law 5, measured: trained under one strategy and world size, continued under another, against never interrupted.

Every source trains a small tied model for 15 steps of 12 rows (three epochs of 50 rows, each with a ragged end of two)
and saves after step 7, in the middle of the second epoch. Every target continues from every source's checkpoint, all
of them in one launch. A cell is the largest relative L2 distance of a parameter, an AdamW moment or a step count,
after step 15, from one process that was never interrupted. On the diagonal it is the distance from the strategy's own
uninterrupted run, with dropout off and with dropout on. Ranks write down the rows that they are given.

Bounds: 1e-5, the published tolerance; 0 on the diagonal; before and after the interruption together, each row of each
epoch exactly once.

    python benchmarks/any_to_any.py [--sizes 1,2] [--only fsdp-full,ddp] [--json FILE] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from distcore import BatchPlan, MicroBatch, Run, Sampler, checkpoint, hookimpl
from distcore.config import RunConfig
from distcore.engine.loop import steps
from distcore.engine.resolve import build_strategy, resolve
from distcore.engine.trainer import build_run
from distcore.errors import DistcoreError
from distcore.launchers import export, join, launch
from distcore.plugin import registry
from distcore.plugin.contract import Progress, RankInfo, World
from distcore.plugin.hooks import Hooks
from distcore.testing.lab import Unsynced
from distcore.testing.problem import Problem
from distcore.testing.reference import apart

PUBLISHED = 1e-5
HALF, LAST, EPOCHS = 7, 15, 3
PROBLEM = Problem(tied=True)
START, NOISY = "start", "noisy"
"""What a setting trains from the beginning: without dropout, and with it."""
AGAIN = "noisy-again"
"""The second, continued by itself."""
JOB: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 3,
    "epochs": EPOCHS,
    "lr": 0.01,
    "optimizer": {"eps": 1e-2, "weight_decay": 0.1},
    "schedule": {"name": "linear", "warmup_steps": 2},
    "data_guard_steps": 0,
    "device": "cpu",
    "extensions": {"progress": False, "metrics": False},
    "timeout": 120,
    "out": "unused",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A strategy with options on some ranks."""

    strategy: str
    nproc: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join([self.strategy, *map(str, self.options.values())]) + f"×{self.nproc}"


STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("fsdp", {"sharding": "full"}),
    ("fsdp", {"sharding": "grad"}),
    ("deepspeed", {"stage": 1}),
    ("deepspeed", {"stage": 2}),
    ("deepspeed", {"stage": 3}),
    ("horovod", {}),
    ("accelerate", {}),
]


def settings(sizes: list[int], only: list[str]) -> list[Setting]:
    """``single``, and each installed strategy at each world size."""
    installed = registry.offers("strategies")
    found = [Setting(strategy="single")]
    found += [
        Setting(strategy=name, options=options, nproc=size)
        for name, options in STRATEGIES
        if name in installed
        for size in sizes
    ]
    return [one for one in found if not only or one.strategy == "single" or one.name.rpartition("×")[0] in only]


class Dealt:
    """An extension that writes down which rows this rank is dealt, by step and epoch."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []

    @hookimpl(wrapper=True)
    def build_sampler(self, run: Run, plan: BatchPlan) -> Generator[None, Sampler, Sampler]:
        sampler = yield

        def noting(epoch: int, step: int) -> list[MicroBatch]:
            micros = list(sampler(epoch, step))
            rows = [int(row) for micro in micros if not micro.is_padding for row in micro.indices]
            self.rows += [(epoch * plan.steps + step, epoch, row) for row in rows]
            return micros

        return noting


def train(setting: Setting, sources: dict[str, str | None], folder: str) -> None:
    """In each rank: train from each source (``None``: from the start), and save after step 15, and 7 on the way."""
    rank_info = join(os.environ) or RankInfo()
    if rank_info.size > 1:
        export(rank_info)
    given = {"strategy": setting.strategy, "strategy_options": setting.options, "nproc": setting.nproc}
    config = resolve(RunConfig.model_validate(JOB | given), rank_info.size, rank_info.launcher)
    dealt = Dealt()
    hooks = Hooks(config.strategy, build_strategy(config), {"dealt": dealt})
    world = hooks.setup(config, rank_info)
    for source, path in sources.items():
        out = Path(folder, setting.name, source)
        continue_from(path, out, config, hooks, world, replace(PROBLEM, dropout=0.1 if NOISY in source else 0.0))
        (out / f"dealt-{world.rank}.json").write_text(json.dumps(dealt.rows))
        dealt.rows.clear()
    hooks.teardown(world)


def continue_from(path: str | None, out: Path, config: RunConfig, hooks: Hooks, world: World, task: Problem) -> None:
    """Train one run to its end; nothing of it is left then, as a backend may keep one model at a time."""
    data = task.prepare(config)
    run = build_run(config, hooks, world, task, data)
    progress = checkpoint.load(run, hooks, Path(path))[0] if path else Progress()
    for progress, _, _ in steps(run, hooks, task, data.train, progress):  # noqa: B020
        if progress.step in (HALF, LAST):
            checkpoint.save(run, hooks, progress, out, {"best": None}, Unsynced())


def at(folder: str, setting: Setting, source: str, step: int) -> Path:
    return Path(folder, setting.name, source, f"step-{step:08d}")


def start(setting: Setting, sources: dict[str, str | None], folder: str) -> str | None:
    """Launch; return what went wrong."""
    try:
        launch(partial(train, setting, sources, folder), nproc=setting.nproc, timeout=600)
    except DistcoreError as error:
        return str(error)
    return None


def distance(found: Path, expected: Path) -> float:
    return apart(checkpoint.read_tensors(found), checkpoint.read_tensors(expected))[0]


def rows_seen(folder: str, setting: Setting, source: str, first: int, end: int) -> Counter[tuple[int, int]]:
    """How often each row of each epoch was trained on, on any rank, in steps ``first`` to ``end``."""
    files = Path(folder, setting.name, source).glob("dealt-*.json")
    dealt = [entry for file in files for entry in json.loads(file.read_text())]
    return Counter((epoch, row) for step, epoch, row in dealt if first <= step < end)


def seen_once(folder: str, source: Setting, target: Setting) -> bool:
    """Whether both halves together saw each row of each epoch exactly once, and the second no row of the first."""
    before = rows_seen(folder, source, START, 0, HALF)
    after = rows_seen(folder, target, source.name, 0, LAST)
    return before + after == Counter((epoch, row) for epoch in range(EPOCHS) for row in range(PROBLEM.rows))


def matrix(every: list[Setting], folder: str) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Distances by source and target, and what failed. What ``folder`` holds already is not done again."""
    broken: dict[str, str] = {}
    for number, setting in enumerate(every, 1):
        print(f"train {number}/{len(every)}: {setting.name}", file=sys.stderr, flush=True)
        todo = {name: None for name in (START, NOISY) if not done(folder, setting, name)}
        if todo and (problem := start(setting, dict(todo), folder)):
            broken[setting.name] = problem
    sources = [setting for setting in every if setting.name not in broken]
    table: dict[str, dict[str, float]] = {setting.name: {} for setting in sources}
    for number, target in enumerate(sources, 1):
        print(f"continue {number}/{len(sources)}: {target.name}", file=sys.stderr, flush=True)
        starts = {source.name: str(at(folder, source, START, HALF)) for source in sources}
        starts[AGAIN] = str(at(folder, target, NOISY, HALF))
        todo_here = {name: path for name, path in starts.items() if not done(folder, target, name)}
        if todo_here and (problem := start(target, dict(todo_here), folder)):
            broken[f"→ {target.name}"] = problem
            continue
        for source in sources:
            reference = at(folder, target if source == target else every[0], START, LAST)
            table[source.name][target.name] = distance(at(folder, target, source.name, LAST), reference)
            if not seen_once(folder, source, target):
                broken[f"{source.name} → {target.name}"] = "a row was not seen exactly once in its epoch"
        if noise := distance(at(folder, target, AGAIN, LAST), at(folder, target, NOISY, LAST)):
            broken[f"{target.name} with dropout"] = f"{noise:.1e} from its own uninterrupted run"
    return table, broken


def done(folder: str, setting: Setting, source: str) -> bool:
    """Whether an earlier call did it to the end, on every rank."""
    written = Path(folder, setting.name, source).glob("dealt-*.json")
    return len(list(written)) == setting.nproc and at(folder, setting, source, LAST).exists()


def show(table: dict[str, dict[str, float]]) -> None:
    """The matrix as a Markdown table."""
    names = list(table)
    print(f"| from \\ to | {' | '.join(names)} |")
    print(f"|---|{'---|' * len(names)}")
    for source, row in table.items():
        cells = (row.get(name, float("nan")) for name in names)
        print(f"| {source} | {' | '.join(f'{cell:.1e}' if cell else '0' for cell in cells)} |")


def preload() -> None:
    """Import here, once, what every rank needs: they are forked from this process."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("transformers.optimization", "safetensors.torch", "deepspeed", "accelerate", "horovod.torch"):
        with suppress(ImportError):
            import_module(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2", help="world sizes")
    parser.add_argument("--only", default="", help="strategies with their option, such as fsdp-full,deepspeed-3")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--folder", help="keep the checkpoints there, and go on where an earlier call ended")
    arguments = parser.parse_args()
    every = settings([int(size) for size in arguments.sizes.split(",")], [n for n in arguments.only.split(",") if n])
    preload()
    with nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory() as folder:
        table, broken = matrix(every, folder)
    show(table)
    worst = max((value for row in table.values() for value in row.values()), default=float("nan"))
    exact = all(row.get(name) == 0 for name, row in table.items())
    print(f"\nlargest distance {worst:.1e}, published {PUBLISHED:.0e}; same strategy and size bit for bit: {exact}")
    for name, problem in broken.items():
        print(f"failed: {name}: {problem}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"table": table, "broken": broken}, indent=1))
    return 0 if worst <= PUBLISHED and exact and not broken else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
