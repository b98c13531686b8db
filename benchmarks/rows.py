"""Measure the cost of a billion rows, and of thousands of ranks, in distcore's own
code, without a model.

    python benchmarks/rows.py [--rows 1000000000] [--rounds 15]

One process plays rank 0 of a world that a strategy of this file reports: it answers every hook
itself and computes nothing, so that only the loop, the sampler and the order of the rows are
measured. No collective runs. In the two steps in which ranks compare their rows, the strategy gives
the result of all ranks. Lengths are a computed column, 2 to 38 tokens; a rank has 32 rows.

Start: a process of its own in which a step on 1,000 rows has imported all modules: the seconds
until the first step is done, and the peak of its resident memory after three steps beyond the peak
before, as rank 0 of 16,384.

Cost of a step: CPU time, the best of several rounds in which worlds take turns. Rows count
``alike``, or their items
are ``counted``: read and added up by every rank, for the whole global batch. That part grows with
the global batch and not with the number of ranks, so 2 ranks and 16,384 are compared at the same
global batch, one micro-batch per rank and step. At the same rows per rank the world that a rank
sorts by length ends at 64 ranks (docs/decisions/splitting.md), so 16,384 are compared with 64; what
they cost more than 2 is printed in microseconds, too.

Bounds: start under 5 s and under 200 MiB; a step at 16,384 ranks takes at most 5 % more than at 2
ranks for the same global batch, at most 5 % more than at 64 for the same rows per rank, and at most
500 µs more than at 2, which is 5 % of a step of 10 ms.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
from torch import Tensor, nn

from distcore import (
    BatchPlan,
    Capabilities,
    Column,
    ConstantColumn,
    Datasets,
    RunConfig,
    World,
    hookimpl,
)
from distcore.checkpoint.job_state import fingerprint
from distcore.engine.build import build_run
from distcore.engine.loop import steps as loop_steps
from distcore.plugin.batching.sampling import rank_sampler
from distcore.plugin.strategy.contract import (
    MicroBatch,
    Progress,
    RankInfo,
    Run,
    Sampler,
    StepLoss,
    StepResult,
)
from distcore.plugin.strategy.hooks import Hooks
from distcore.resolve.resolve import resolve

PER_RANK, FEW, GROUP, MANY = 32, 2, 64, 16_384
SECONDS, MEBIBYTES, RATIO, MORE = 5.0, 200.0, 1.05, 500.0
Shape = tuple[int, int]
"""A world: its ranks, and the rows of its global batch."""
logging.disable(logging.WARNING)


class Computed:
    """A column that takes no memory."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        return rows * 2_654_435_761 % 37 + 2


class Data:
    """Rows of which nothing is read."""

    content = "computed rows"

    def __init__(self, rows: int, counted: bool) -> None:
        self.lengths = Computed(rows)
        self.items: Column = Computed(rows) if counted else ConstantColumn(rows, 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return nothing: collating is the task's."""
        return {}


class Pretended:
    """A strategy that reports a world of any size and computes nothing."""

    capabilities: ClassVar = Capabilities(spec_version=3, processes="one")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.guarded: Iterator[np.ndarray] = iter(())

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Report the world."""
        return World(rank=0, size=self.ranks, local_rank=0, device=torch.device("cpu"))

    @hookimpl
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        """Return the usual sampler, and prepare what ranks will answer when
        they compare their rows.
        """
        self.guarded = (plan.rows(0, step) for step in range(plan.steps))
        return rank_sampler(plan, run.world.shard, run.world.shards)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of all ranks; anything else as one rank has it."""
        return {"index": torch.from_numpy(next(self.guarded))} if "index" in outputs else outputs

    @hookimpl
    def train_step(
        self, run: Run, micros: list[tuple[MicroBatch, dict[str, Tensor]]], loss: StepLoss
    ) -> Tensor:
        """Compute nothing."""
        return torch.zeros(())

    @hookimpl
    def step(self, run: Run, clip: object) -> StepResult:
        """Change nothing."""
        return StepResult()


class Job:
    """As much of a task as the loop asks for."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Build a model of two parameters."""
        return nn.Linear(1, 1)

    def weights_folder(self, config: RunConfig) -> None:
        """Return ``None``: the model has random weights."""

    def row_loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Fail: a step of this benchmark ends before its loss."""
        raise NotImplementedError


def training(rows: int, ranks: int, batch: int, counted: bool, guard: int = 0) -> Iterator[Any]:
    """Return the loop's steps as rank 0 of ``ranks``, ``batch`` rows each,
    one micro-batch per rank.
    """
    config = RunConfig(
        lr=1e-3,
        out=tempfile.gettempdir() + "/distcore-rows",  # nothing is written there
        schedule={"name": "constant"},
        extensions={"progress": False, "metrics": False},
        data_guard_steps=guard,
        global_batch_size=batch,
        micro_batch_size=batch // ranks,
        max_steps=10**6,
        device="cpu",
    )
    config = resolve(config, None).config.model_copy(
        update={"micro_batch_size": batch // ranks, "global_batch_size": batch}
    )
    hooks, job, data = Hooks("pretended", Pretended(ranks)), Job(), Data(rows, counted)
    fingerprint(data)
    datasets = Datasets(train=data, evaluation=data, test=data)
    run = build_run(config, hooks, hooks.setup(config, RankInfo()), job, datasets)  # type: ignore[arg-type]
    return loop_steps(run, hooks, job, data, Progress())  # type: ignore[arg-type]


def peak() -> float:
    """Return the peak of this process's resident memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start(rows: int, counted: bool) -> None:
    """Print as JSON the seconds to the first step, and the MiB of three steps, in this process."""
    # imports what torch imports when it is first used
    next(training(1000, FEW, FEW * PER_RANK, counted, guard=2))
    before, began = peak(), time.perf_counter()
    run = training(rows, MANY, MANY * PER_RANK, counted, guard=2)
    next(run)
    seconds = time.perf_counter() - began
    next(run), next(run)
    print(json.dumps([seconds, peak() - before]))


def measure_start(rows: int, counted: bool) -> tuple[float, float]:
    """Return what ``start`` measures in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--rows",
        str(rows),
        "--start",
        "counted" if counted else "alike",
    ]
    seconds, mebibytes = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return seconds, mebibytes


def costs(
    rows: int, worlds: list[Shape], counted: bool, rounds: int, steps: int
) -> dict[Shape, float]:
    """Return the CPU µs of a step in each world: the best of ``rounds`` of so many steps,
    the worlds taking turns.
    """
    best = dict.fromkeys(worlds, float("inf"))
    runs = {world: training(rows, *world, counted) for world in worlds}
    for run in runs.values():
        next(run)
    for number in range(rounds):
        for world in worlds if number % 2 == 0 else worlds[::-1]:
            began = time.process_time()
            for _ in range(steps):
                next(runs[world])
            best[world] = min(best[world], (time.process_time() - began) / steps * 1e6)
    return best


def main() -> int:
    """Measure start, memory and steps; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--start", choices=["alike", "counted"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.start:
        start(arguments.rows, arguments.start == "counted")
        return 0
    held = True
    print(
        f"{arguments.rows:,} rows, rank 0 of {MANY:,}\n\n{'items':<10} {'first step, s':>14}"
        f" {'MiB':>8}"
    )
    for items in ("alike", "counted"):
        seconds, mebibytes = measure_start(arguments.rows, items == "counted")
        held &= seconds < SECONDS and mebibytes < MEBIBYTES
        print(f"{items:<10} {seconds:>14.2f} {mebibytes:>8.0f}")
    whole = MANY * PER_RANK
    few, group, same, many = worlds = [
        (FEW, FEW * PER_RANK), (GROUP, GROUP * PER_RANK), (FEW, whole), (MANY, whole)
    ]  # fmt: skip
    rounds = arguments.rounds
    # short turns: the least disturbed counts
    alike = costs(arguments.rows, [few, group, many], False, 20 * rounds, 20)
    alike[same] = costs(arguments.rows, [same, many], False, rounds, 2)[same]
    counted = costs(arguments.rows, worlds, True, rounds, 2) | costs(
        arguments.rows, [few, group], True, rounds, 20
    )
    print(f"\n{'ranks':>8} {'global batch':>14} {'alike, µs/step':>16} {'counted, µs/step':>18}")
    for ranks, batch in worlds:
        print(
            f"{ranks:>8,} {batch:>14,} {alike[ranks, batch]:>16.0f} {counted[ranks, batch]:>18.0f}"
        )
    ratios = {
        f"same global batch, alike, to {FEW} ranks": alike[many] / alike[same],
        f"same global batch, counted, to {FEW} ranks": counted[many] / counted[same],
        f"same rows per rank, alike, to {GROUP} ranks": alike[many] / alike[group],
    }
    print(f"\n{MANY:,} ranks:")
    for what, ratio in ratios.items():
        held &= ratio <= RATIO
        print(f"  {what}: {ratio:.3f}")
    more = alike[many] - alike[few]
    held &= more <= MORE
    print(
        f"  same rows per rank, alike: {more:.0f} µs more than {FEW} ranks: 5 % of a step of"
        f" {more / 50:.1f} ms"
    )
    print(
        f"\nbounds: {SECONDS:.0f} s, {MEBIBYTES:.0f} MiB, {RATIO}, {MORE:.0f} µs:"
        f" {'held' if held else 'BROKEN'}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
