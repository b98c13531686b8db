"""Compare distcore with a hand-written script on the same backend and the same job: samples
per second and losses.

    python benchmarks/native_parity.py [ddp fsdp … horovod/ddp] [--nproc 2]
    [--rounds 5] [--steps 60]

Both run in ranks started the same way, one thread each, alternating within a round (which
one goes first alternates too); start-up and the first steps are not timed. Step i trains on the
same rows in all runs, so its best time over the
rounds is what it costs when nothing else disturbs it: samples per second are of those best times,
and the ratio is distcore's over the script's. The range is of single rounds.

Bounds: a ratio of at least 0.98, 0.97 under mesh, and losses equal within 1e-4 of their size.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch.distributed as dist
from native.job import LOG_EVERY, Job, Timing, durations

from distcore import Progress, Run, RunConfig, StepResult, hookimpl, launch, load_config, train
from distcore.rank_environment import join
from distcore.registry import load_file
from distcore.resolve import tasks
from distcore.resolve.resolve import resolve

BOUND, MESH_BOUND, LOSS_BOUND = 0.98, 0.97, 1e-4
ROWS = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "deepspeed:0": ("deepspeed", {"stage": 0}),
    "deepspeed:1": ("deepspeed", {"stage": 1}),
    "deepspeed:2": ("deepspeed", {"stage": 2}),
    "deepspeed:3": ("deepspeed", {"stage": 3}),
    "horovod": ("horovod", {}),
    "accelerate": ("accelerate", {}),
    "mesh:tp": ("mesh", {"tp": 2}),
    "mesh:shard+tp": ("mesh", {"shard": 2, "tp": 2}),
    "mesh:pp": ("mesh", {"pp": 2}),
}
RANKS = {"mesh:shard+tp": 4}
"""Ranks of a row that needs more than --nproc."""


@dataclass
class StepClock:
    """An extension that records when each step ended, and the losses of the log lines."""

    latest: ClassVar[StepClock | None] = None
    """The clock of the run in this process, once it has logged."""
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        """Record the loss."""
        self.losses.append(record["loss"])
        StepClock.latest = self


VERSUS = {"horovod/ddp": ("horovod", "ddp")}
"""Rows that compare two strategies of distcore; they have no bound."""


def config_of(row: str, nproc: int, steps: int, model: str) -> RunConfig:
    """Return the config of a row's job."""
    strategy, options = ROWS[row]
    return load_config(
        None,
        {
            "strategy": strategy,
            "strategy_options": options,
            "nproc": nproc,
            "model": model,
            "device": "cpu",
            "data": "stdlib-docs",
            "global_batch_size": 64,
            "micro_batch_size": 16,
            "max_steps": steps,
            "dropout": 0.0,
            "log_every": LOG_EVERY,
            "data_guard_steps": 0,
            "checkpoints.best": None,
            "log_level": "error",
            "extensions": {"progress": False, "metrics": False, f"{__file__}:StepClock": True},
        },
    )


def ours(config: RunConfig) -> Timing:
    """Train with distcore in one rank."""
    train(config.model_copy(update={"out": tempfile.mkdtemp()}))
    # of this file as the run imported it
    clock = load_file("extension", f"{__file__}:StepClock").latest
    return Timing(step_seconds=durations(clock.times), losses=clock.losses)


def native(config: RunConfig, row: str) -> Timing:
    """Train with the hand-written script in one rank."""
    rank_info = join()
    assert rank_info is not None  # launch() started this rank
    resolved = resolve(config, rank_info.size)
    config, task = resolved.config, resolved.task
    job = Job(
        config=config,
        data=task.prepare(config),
        task=task,
        rank=rank_info.rank,
        size=rank_info.size,
    )
    script = importlib.import_module(f"native.{row.partition(':')[0]}_script")
    timing: Timing = script.train(job)
    # free the wrapped model before its process group, whose end may otherwise wait for it forever
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    return timing


def main() -> int:
    """Measure the rows; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", choices=[*ROWS, *VERSUS, []], default=["ddp"])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="bert-mini")
    arguments = parser.parse_args()
    if arguments.steps % LOG_EVERY:
        parser.error(
            f"--steps {arguments.steps}: must be a multiple of {LOG_EVERY}, after which losses are"
            " logged"
        )
    print(f"{'row':<14}{'distcore':>12}{'native':>12}   ratio of samples/s (range)     loss diff.")
    held = [measure(row, arguments) for row in arguments.rows]
    bounds = f"ratio at least {BOUND} ({MESH_BOUND} under mesh), losses within {LOSS_BOUND}"
    print(f"bound: {bounds}: {'held' if all(held) else 'BROKEN'}")
    return 0 if all(held) else 1


def measure(row: str, arguments: argparse.Namespace) -> bool:
    """Measure one row and print it; True if the bounds hold."""
    one, other = VERSUS.get(row, (row, None))
    nproc = RANKS.get(row, arguments.nproc)
    config, *others = (
        config_of(name, nproc, arguments.steps, arguments.model) for name in (one, other) if name
    )
    calls: dict[str, tuple[Any, ...]] = {"one": (ours, config)}
    calls["other"] = (ours, others[0]) if others else (native, config, row)
    task = tasks.load_task(config)
    task.prepare(config)  # once, before anything is timed
    seconds: dict[str, list[list[float]]] = {"one": [], "other": []}
    difference = 0.0
    for number in range(arguments.rounds):
        timings: dict[str, Timing] = {}
        for name in ("one", "other") if number % 2 == 0 else ("other", "one"):
            timings[name] = launch(*calls[name], nproc=nproc)[0]
            seconds[name].append(timings[name].step_seconds)
        pairs = zip(timings["one"].losses, timings["other"].losses, strict=True)
        difference = max(difference, *(abs(a - b) / abs(b) for a, b in pairs))
    ratios = [sum(b) / sum(a) for a, b in zip(seconds["one"], seconds["other"], strict=True)]
    mine, theirs = (sum(map(min, zip(*seconds[name], strict=True))) for name in ("one", "other"))
    rows = config.global_batch_size * len(seconds["one"][0])
    ratio = theirs / mine
    spread = f"{ratio:.3f} ({min(ratios):.2f} … {max(ratios):.2f})"
    print(
        f"{row:<14}{rows / mine:>12.1f}{rows / theirs:>12.1f}{spread:>32}{difference:>14.1e}",
        flush=True,
    )
    bound = MESH_BOUND if row.startswith("mesh") else BOUND
    return (
        (ratio >= bound or row in VERSUS) and math.isfinite(difference) and difference <= LOSS_BOUND
    )


if __name__ == "__main__":
    sys.exit(main())
