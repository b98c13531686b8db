"""Measure law 5: train under one strategy and world size, continue under another, compare
with an uninterrupted run.

Every source trains a small tied model for 15 steps of 12 rows (three epochs of 50 rows, each with a
ragged end of two) and saves after step 7, in the middle of the second epoch. Every target continues
from every source's checkpoint, all of them in one launch. A cell is the largest relative L2
distance of a parameter, an AdamW moment or a step count, after step 15, from one process that was
never interrupted. On the diagonal it is the distance from the strategy's own uninterrupted run,
with dropout off and with dropout on. Ranks write down the rows that they are given.

Bounds: 1e-5, the published tolerance; 0 on the diagonal; before and after the interruption
together, each row of each epoch exactly once.

The settings that keep the bits of ``--exact`` do all this once more under it, without dropout. A
cell then is the number of elements of weights, moments and step counts that differ in any bit after
step 15 from one process that was never interrupted. The bound is 0.

The printed summary has the largest distance of runs from the checkpoints of each strategy, and the
largest number of these elements. Pipeline stages cannot share a weight, so ``--untied`` measures
them on a model with four blocks and no tied weight. ``--experts`` measures a mixture
of experts, and strategies that share them over ranks.

    python benchmarks/any_to_any.py [--sizes 1,2] [--only fsdp-full,ddp] [--untied | --experts]
                                    [--json FILE] [--folder DIR] [--page]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from torch import Tensor

from distcore import BatchPlan, MicroBatch, Run, Sampler, checkpoint, hookimpl, registry
from distcore.config import RunConfig
from distcore.engine.build import build_run
from distcore.engine.loop import steps
from distcore.errors import DistcoreError
from distcore.launchers import launch
from distcore.plugin.strategy.contract import Progress, RankInfo, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.rank_environment import export, join
from distcore.resolve import strategies
from distcore.resolve.resolve import resolve
from distcore.testing.lab import Unsynced
from distcore.testing.problem import Problem
from distcore.testing.reference import largest_difference

PUBLISHED = 1e-5
NUMBERS = Path(__file__).parents[1] / "docs/any-to-any.json"
BITS = Path(__file__).parents[1] / "docs/any-to-any-bits.json"
BLOCKS = 4
"""Blocks of a step under ``exact``: the most ranks of a setting."""
HALF, LAST, EPOCHS = 7, 15, 3
"""Step of the first checkpoint, last step, epochs."""
TIED, UNTIED, MIXTURE = Problem(tied=True), Problem(blocks=4), Problem(tied=True, experts=4)
START, DROPOUT = "start", "dropout"
"""Names of the runs that a setting trains from the beginning: without dropout, and with it."""
DROPOUT_RESUMED = "dropout-resumed"
"""Name of the run with dropout that the same setting resumes."""
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
    """A strategy with its options and a number of ranks."""

    strategy: str
    nproc: int = 1
    """Ranks."""
    options: dict[str, Any] = field(default_factory=dict)
    problem: Problem = TIED
    """The trained problem."""
    exact: int | None = None
    """Blocks of a step under ``exact``; ``None``: without it."""

    @property
    def job(self) -> dict[str, Any]:
        """The config of its ranks."""
        of_setting = {
            "strategy": self.strategy,
            "strategy_options": self.options,
            "nproc": self.nproc,
            "exact": self.exact,
        }
        return JOB | of_setting

    @property
    def keeps_bits(self) -> bool:
        """True if its strategy keeps the bits of ``exact`` in fp32."""
        strategy = strategies.load_strategy(RunConfig.model_validate(self.job))
        return strategy.capabilities.keeps_bits("fp32")

    @property
    def name(self) -> str:
        """The name in the matrix, such as ``fsdp-full×2``."""
        return (
            "-".join(
                [
                    self.strategy,
                    *(f"{k}{v}" if k in GROUPS else str(v) for k, v in self.options.items()),
                ]
            )
            + f"×{self.nproc}"
        )


GROUPS = ("tp", "pp", "ep")
"""Options that say how many ranks are a group; the number of ranks must be a multiple."""
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("fsdp", {"sharding": "full"}),
    ("fsdp", {"sharding": "grad"}),
    ("mesh", {"tp": 2}),
    ("mesh", {"ep": 2}),
    ("mesh", {"ep": 4}),
    ("mesh", {"ep": 2, "tp": 2}),
    ("mesh", {"pp": 2}),
    ("mesh", {"pp": 2, "pp_schedule": "interleaved"}),
    ("deepspeed", {"stage": 1}),
    ("deepspeed", {"stage": 2}),
    ("deepspeed", {"stage": 3}),
    ("horovod", {}),
    ("accelerate", {}),
]


def settings(sizes: list[int], only: list[str], problem: Problem) -> list[Setting]:
    """Return ``single``, and each installed strategy at each world size; ``only``:
    names to choose from them.
    """
    installed = registry.offers("strategies")
    every = [Setting(strategy="single", problem=problem)]
    every += [
        Setting(strategy=name, options=options, nproc=size, problem=problem)
        for name, options in STRATEGIES
        if name in installed
        and not ("pp" in options and problem.tied)
        and not ("ep" in options and not problem.experts)
        for size in sizes
        if size % prod(options.get(group, 1) for group in GROUPS) == 0
    ]
    return [
        one
        for one in every
        if not only or one.strategy == "single" or one.name.rpartition("×")[0] in only
    ]


class RowRecorder:
    """An extension that records which rows this rank gets, as (step, epoch, row)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []

    @hookimpl(wrapper=True)
    def build_sampler(self, run: Run, plan: BatchPlan) -> Generator[None, Sampler, Sampler]:
        """Record the rows of each micro-batch that is not padding."""
        sampler = yield

        def recording(epoch: int, step: int) -> list[MicroBatch]:
            micros = list(sampler(epoch, step))
            rows = [int(row) for micro in micros if not micro.is_padding for row in micro.indices]
            self.rows += [(epoch * plan.steps + step, epoch, row) for row in rows]
            return micros

        return recording


def train(setting: Setting, sources: dict[str, str | None], folder: str) -> None:
    """Train in one rank from each source (``None``: from the start); save after step 15,
    and after step 7.
    """
    rank_info = join(os.environ) or RankInfo()
    if rank_info.size > 1:
        export(rank_info)
    given = RunConfig.model_validate(setting.job)
    config = resolve(given, rank_info.size, rank_info.launcher).config
    recorder = RowRecorder()
    hooks = Hooks(config.strategy, strategies.load_strategy(config).plugin, {"rows": recorder})
    world = hooks.setup(config, rank_info)
    for source, path in sources.items():
        out = Path(folder, setting.name, source)
        continue_from(
            path,
            out,
            config,
            hooks,
            world,
            replace(setting.problem, dropout=0.1 if DROPOUT in source else 0.0),
        )
        # Ranks of one data shard have the same rows, and one of them speaks for it.
        (out / f"rows-{world.rank}.json").write_text(
            json.dumps(recorder.rows if world.is_shard_leader else [])
        )
        recorder.rows.clear()
    hooks.teardown(world)


def continue_from(
    path: str | None, out: Path, config: RunConfig, hooks: Hooks, world: World, task: Problem
) -> None:
    """Train one run to its end. It is freed on return, since some backends can hold only one
    model at a time.
    """
    data = task.prepare(config)
    run = build_run(config, hooks, world, task, data)
    progress = checkpoint.load(run, hooks, Path(path))[0] if path else Progress()
    for step in steps(run, hooks, task, data.train, progress):
        if step.progress.step in (HALF, LAST):
            checkpoint.save(run, hooks, step.progress, out, {"best": None}, Unsynced())


def at(folder: str, setting: Setting, source: str, step: int) -> Path:
    """Return the checkpoint of a run."""
    return Path(folder, setting.name, source, f"step-{step:08d}")


def start(setting: Setting, sources: dict[str, str | None], folder: str) -> str | None:
    """Launch the ranks of a setting; return the error, ``None`` on success."""
    try:
        launch(partial(train, setting, sources, folder), nproc=setting.nproc, timeout=600)
    except DistcoreError as error:
        return str(error)
    return None


def distance(weights: Path, expected: Path) -> float:
    """Return the largest relative distance of a tensor between two checkpoints."""
    return largest_difference(checkpoint.read_tensors(weights), checkpoint.read_tensors(expected))[
        0
    ]


def rows_seen(
    folder: str, setting: Setting, source: str, first: int, end: int
) -> Counter[tuple[int, int]]:
    """Count how often each (epoch, row) was trained on, over all ranks, in the steps ``first``
    to ``end - 1``.
    """
    files = Path(folder, setting.name, source).glob("rows-*.json")
    recorded = [entry for file in files for entry in json.loads(file.read_text())]
    return Counter((epoch, row) for step, epoch, row in recorded if first <= step < end)


def seen_once(folder: str, source: Setting, target: Setting) -> bool:
    """Return True if both parts of a run together trained on each row of
    each epoch exactly once.
    """
    before = rows_seen(folder, source, START, 0, HALF)
    after = rows_seen(folder, target, source.name, 0, LAST)
    return before + after == Counter(
        (epoch, row) for epoch in range(EPOCHS) for row in range(source.problem.rows)
    )


def matrix(every: list[Setting], folder: str) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return the distances by source and target, and the failures. Keeps runs that
    are already in ``folder``.
    """
    broken: dict[str, str] = {}
    for number, setting in enumerate(every, 1):
        print(f"train {number}/{len(every)}: {setting.name}", file=sys.stderr, flush=True)
        todo = {name: None for name in (START, DROPOUT) if not done(folder, setting, name)}
        if todo and (problem := start(setting, dict(todo), folder)):
            broken[setting.name] = problem
    sources = [setting for setting in every if setting.name not in broken]
    table: dict[str, dict[str, float]] = {setting.name: {} for setting in sources}
    for number, target in enumerate(sources, 1):
        print(f"continue {number}/{len(sources)}: {target.name}", file=sys.stderr, flush=True)
        starts = {source.name: str(at(folder, source, START, HALF)) for source in sources}
        starts[DROPOUT_RESUMED] = str(at(folder, target, DROPOUT, HALF))
        missing = {name: path for name, path in starts.items() if not done(folder, target, name)}
        if missing and (problem := start(target, dict(missing), folder)):
            broken[f"→ {target.name}"] = problem
            continue
        for source in sources:
            reference = at(folder, target if source == target else every[0], START, LAST)
            table[source.name][target.name] = distance(
                at(folder, target, source.name, LAST), reference
            )
            if not seen_once(folder, source, target):
                broken[f"{source.name} → {target.name}"] = (
                    "not every row was trained on exactly once per epoch"
                )
        if moved := distance(
            at(folder, target, DROPOUT_RESUMED, LAST), at(folder, target, DROPOUT, LAST)
        ):
            broken[f"{target.name} with dropout"] = (
                f"distance {moved:.1e} from its own uninterrupted run"
            )
    return table, broken


def matrix_of_bits(
    every: list[Setting], folder: str
) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Return by source and target how many elements have other bits than one process under
    ``exact``, of the settings that keep them, and the failures.
    """
    broken: dict[str, str] = {}
    able = [replace(setting, exact=BLOCKS) for setting in every if setting.keeps_bits]
    for number, setting in enumerate(able, 1):
        print(f"train exactly {number}/{len(able)}: {setting.name}", file=sys.stderr, flush=True)
        is_missing = not done(folder, setting, START)
        if is_missing and (problem := start(setting, {START: None}, folder)):
            broken[f"{setting.name} under exact"] = problem
    able = [setting for setting in able if f"{setting.name} under exact" not in broken]
    expected = checkpoint.read_tensors(at(folder, able[0], START, LAST))
    table: dict[str, dict[str, int]] = {setting.name: {} for setting in able}
    for target in able:
        print(f"continue exactly: {target.name}", file=sys.stderr, flush=True)
        starts = {source.name: str(at(folder, source, START, HALF)) for source in able}
        missing = {name: path for name, path in starts.items() if not done(folder, target, name)}
        if missing and (problem := start(target, dict(missing), folder)):
            broken[f"→ {target.name} under exact"] = problem
            continue
        for source in able:
            actual = checkpoint.read_tensors(at(folder, target, source.name, LAST))
            table[source.name][target.name] = elements_that_differ(actual, expected)
    return table, broken


def elements_that_differ(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    """Return how many elements of tensors differ in any bit; all of one that is missing."""
    count = 0
    for name in actual.keys() | expected.keys():
        if name in actual and name in expected and actual[name].shape == expected[name].shape:
            count += int((actual[name] != expected[name]).sum())
        else:
            count += max(1, actual.get(name, expected.get(name, torch.empty(0))).numel())
    return count


def done(folder: str, setting: Setting, source: str) -> bool:
    """Return True if an earlier call has finished this run on every rank."""
    written = Path(folder, setting.name, source).glob("rows-*.json")
    return len(list(written)) == setting.nproc and at(folder, setting, source, LAST).exists()


def summary(table: dict[str, dict[str, float]], bits: dict[str, dict[str, int]]) -> str:
    """Return by the strategy that saved, over all settings, the largest distance and the largest
    number of elements with other bits under ``exact``, as a Markdown table.
    """
    distances, elements = worst_by_strategy(table), worst_by_strategy(bits)
    lines = ["| saved under | largest distance | other bits under exact |", "|---|---|---|"]
    for name, value in distances.items():
        cell = f"{elements[name]:.0f}" if name in elements else "not kept"
        lines.append(f"| {name} | {value:.1e} | {cell} |")
    return "\n".join(lines) + "\n"


def worst_by_strategy(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the largest cell of the rows of each strategy."""
    worst: dict[str, float] = {}
    for source, row in table.items():
        name = re.split("[-×]", source)[0]
        worst[name] = max([worst.get(name, 0.0), *row.values()])
    return worst


def preload() -> None:
    """Import once what every rank needs: ranks are forked from this process."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in (
        "transformers.optimization",
        "safetensors.torch",
        "deepspeed",
        "accelerate",
        "horovod.torch",
    ):
        with suppress(ImportError):
            import_module(name)


def main() -> int:
    """Run the matrix, print it, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1,2", help="world sizes, separated by commas")
    parser.add_argument("--only", default="", help="settings to run, such as fsdp-full,deepspeed-3")
    parser.add_argument(
        "--untied",
        action="store_true",
        help="a model without tied weights; with stages of pipelines",
    )
    parser.add_argument(
        "--experts",
        action="store_true",
        help="a mixture of experts; with strategies that share them over ranks",
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument(
        "--page", action="store_true", help="write docs/any-to-any.json, which docs/laws.md sums up"
    )
    parser.add_argument(
        "--folder", help="keep the checkpoints there, and continue what an earlier call began"
    )
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    trained = UNTIED if arguments.untied else MIXTURE if arguments.experts else TIED
    every = settings([int(size) for size in arguments.sizes.split(",")], only, trained)
    preload()
    with (
        nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory()
    ) as folder:
        table, broken = matrix(every, folder)
        bits, broken_bits = matrix_of_bits(every, str(Path(folder, "exact")))
    broken |= broken_bits
    print(summary(table, bits))
    worst = max((value for row in table.values() for value in row.values()), default=float("nan"))
    exact = all(row.get(name) == 0 for name, row in table.items())
    print(
        f"\nlargest distance {worst:.1e}, published {PUBLISHED:.0e}; same strategy and size bit for"
        f" bit: {exact}"
    )
    other_bits = max((value for row in bits.values() for value in row.values()), default=0)
    print(f"elements with other bits under exact, in any of {len(bits) ** 2} pairs: {other_bits}")
    for name, problem in broken.items():
        print(f"failed: {name}: {problem}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"table": table, "bits": bits, "broken": broken}, indent=1)
        )
    if arguments.page:
        rounded = {
            source: {name: float(f"{value:.1e}") for name, value in row.items()}
            for source, row in table.items()
        }
        NUMBERS.write_text(json.dumps(rounded, indent=1, ensure_ascii=False) + "\n")
        BITS.write_text(json.dumps(bits, indent=1, ensure_ascii=False) + "\n")
    return 0 if worst <= PUBLISHED and exact and not other_bits and not broken else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
