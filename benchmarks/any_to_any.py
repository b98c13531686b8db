"""Law 5, measured: trained under one strategy and world size, continued under another, against never interrupted.

Every source trains a small tied model for 15 steps of 12 rows (three epochs of 50 rows, each with a ragged end of two)
and saves after step 7, in the middle of the second epoch. Every target continues from every source's checkpoint, all
of them in one launch. A cell is the largest relative L2 distance of a parameter or an AdamW moment, after step 15,
from one process that was never interrupted; on the diagonal it is that from the strategy's own uninterrupted run, and
must be 0. Ranks compare the rows that they train on with the plan of each step, so every sample of an epoch is seen
exactly once.

    python benchmarks/any_to_any.py [--sizes 1,2] [--only fsdp-full,ddp] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distcore import checkpoint, registry
from distcore.config import RunConfig
from distcore.contract import Place, Progress
from distcore.errors import DistcoreError
from distcore.hooks import Hooks
from distcore.launch import join, launch
from distcore.loop import steps
from distcore.resolve import resolve
from distcore.testing.problem import Problem
from distcore.testing.reference import apart
from distcore.trainer import build_run, set_up

PUBLISHED = 1e-5
HALF, LAST = 7, 15
PROBLEM = Problem(tied=True)
JOB: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 3,
    "epochs": 3,
    "lr": 0.01,
    "optimizer": {"eps": 1e-2, "weight_decay": 0.1},
    "schedule": {"name": "linear", "warmup_steps": 2},
    "data_guard_steps": 100,
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


def train(setting: Setting, sources: dict[str, str | None], folder: str) -> None:
    """In each rank: train from each source (``None``: from the start), and save after step 15, and 7 on the way."""
    place = join(os.environ) or Place()
    given = {"strategy": setting.strategy, "strategy_options": setting.options, "nproc": setting.nproc}
    config = resolve(RunConfig.model_validate(JOB | given), place.size, place.launcher)
    hooks, world = set_up(config, place)
    data = PROBLEM.prepare(config)
    for source, path in sources.items():
        run = None  # the one before goes first: a backend may keep one model at a time
        run = build_run(config, hooks, world, PROBLEM, data)
        progress = checkpoint.load(run, hooks, Path(path))[0] if path else Progress()
        for progress, _, _ in steps(run, hooks, PROBLEM, data.train, progress):  # noqa: B020
            if progress.step in (HALF, LAST):
                save(run, hooks, progress, Path(folder, setting.name, source))
    del run  # before the process group that it holds
    hooks.teardown(world)


def save(run: Any, hooks: Hooks, progress: Progress, folder: Path) -> None:
    checkpoint.save(run, hooks, progress, folder, {"best": None})


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


def matrix(every: list[Setting], folder: str) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Distances by source and target, and what failed."""
    broken: dict[str, str] = {}
    for number, setting in enumerate(every, 1):
        print(f"train {number}/{len(every)}: {setting.name}", file=sys.stderr, flush=True)
        if problem := start(setting, {"start": None}, folder):
            broken[setting.name] = problem
    sources = [setting for setting in every if setting.name not in broken]
    table: dict[str, dict[str, float]] = {setting.name: {} for setting in sources}
    for number, target in enumerate(sources, 1):
        print(f"continue {number}/{len(sources)}: {target.name}", file=sys.stderr, flush=True)
        starts = {source.name: str(at(folder, source, "start", HALF)) for source in sources}
        if problem := start(target, dict(starts), folder):
            broken[f"→ {target.name}"] = problem
        for source in sources:
            found = at(folder, target, source.name, LAST)
            reference = at(folder, target if source == target else every[0], "start", LAST)
            table[source.name][target.name] = distance(found, reference) if found.exists() else float("nan")
    return table, broken


def show(table: dict[str, dict[str, float]]) -> None:
    """The matrix as a Markdown table."""
    names = list(table)
    print(f"| from \\ to | {' | '.join(names)} |")
    print(f"|---|{'---|' * len(names)}")
    for source, row in table.items():
        print(f"| {source} | {' | '.join(f'{row[name]:.1e}' if row[name] else '0' for name in names)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2", help="world sizes")
    parser.add_argument("--only", default="", help="strategies with their option, such as fsdp-full,deepspeed-3")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    every = settings([int(size) for size in arguments.sizes.split(",")], [n for n in arguments.only.split(",") if n])
    with tempfile.TemporaryDirectory() as folder:
        table, broken = matrix(every, folder)
    show(table)
    worst = max((value for row in table.values() for value in row.values()), default=float("nan"))
    exact = all(table[name][name] == 0 for name in table)
    print(f"\nlargest distance {worst:.1e}, published {PUBLISHED:.0e}; same strategy and size bit for bit: {exact}")
    for name, problem in broken.items():
        print(f"failed: {name}: {problem}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"table": table, "broken": broken}, indent=1))
    return 0 if worst <= PUBLISHED and exact and not broken else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
