"""distcore against a hand-written script on the same backend and the same job: samples a second and losses.

    python benchmarks/native_parity.py [ddp fsdp …] [--nproc 2] [--rounds 5] [--steps 60]

Both run in ranks started the same way, one thread each, alternating within a round (which one goes first alternates
too); start-up and the first steps are not timed. The ratio is the median over rounds of distcore's samples a second
over the script's in the same round. Bound: at least 0.98, and losses equal within 1e-4 of their size.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist
from native.job import LOG_EVERY, WARM_UP, Job, Timing

from distcore import Progress, Run, RunConfig, StepResult, hookimpl, launch, load_config, train
from distcore.launch import join
from distcore.resolve import resolve
from distcore.trainer import load_task

BOUND, LOSS_BOUND = 0.98, 1e-4
ROWS = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "deepspeed:0": ("deepspeed", {"stage": 0}),
    "deepspeed:1": ("deepspeed", {"stage": 1}),
    "deepspeed:2": ("deepspeed", {"stage": 2}),
    "deepspeed:3": ("deepspeed", {"stage": 3}),
    "horovod": ("horovod", {}),
    "accelerate": ("accelerate", {}),
}


@dataclass
class StepClock:
    """An extension that notes when each step ended, and the losses of the log lines."""

    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress, result: StepResult) -> None:
        self.times.append(time.perf_counter())

    @hookimpl
    def on_log(self, run: Run, record: dict[str, float]) -> None:
        self.losses.append(record["loss"])
        CLOCKS[0] = self


CLOCKS: list[StepClock | None] = [None]


def config_of(row: str, nproc: int, steps: int, model: str) -> RunConfig:
    strategy, options = ROWS[row]
    return load_config(None, {
        "strategy": strategy, "strategy_options": options, "nproc": nproc, "model": model, "device": "cpu",
        "data": "stdlib-docs", "global_batch_size": 64, "micro_batch_size": 16, "max_steps": steps, "dropout": 0.0,
        "log_every": LOG_EVERY, "data_guard_steps": 0, "checkpoints.best": None, "log_level": "error",
        "extensions": {"progress": False, "metrics": False, f"{__file__}:StepClock": True},
    })  # fmt: skip


def ours(config: RunConfig) -> Timing:
    train(config.model_copy(update={"out": tempfile.mkdtemp()}))
    clock = sys.modules["distcore_user_native_parity"].CLOCKS[0]
    seconds = clock.times[-1] - clock.times[WARM_UP - 1]
    rows = config.global_batch_size * (len(clock.times) - WARM_UP)
    return Timing(samples_per_second=rows / seconds, losses=clock.losses)


def native(config: RunConfig, row: str) -> Timing:
    place = join()
    assert place is not None  # launch has placed this rank
    config = resolve(config, place.size)
    task = load_task(config)
    job = Job(config=config, data=task.prepare(config), task=task, rank=place.rank, size=place.size)
    script = importlib.import_module(f"native.{row.partition(':')[0]}_script")
    timing: Timing = script.train(job)
    gc.collect()  # a wrapped model must go before its process group, or the group's end may wait for it for ever
    if dist.is_initialized():
        dist.destroy_process_group()
    return timing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], default=["ddp"])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="bert-mini")
    arguments = parser.parse_args()
    print(f"{'row':<14}{'distcore':>12}{'native':>12}   ratio of samples/s (range)     loss diff.")
    held = [measure(row, arguments) for row in arguments.rows]
    print(f"bound: ratio at least {BOUND}, losses within {LOSS_BOUND}: {'held' if all(held) else 'BROKEN'}")
    return 0 if all(held) else 1


def measure(row: str, arguments: argparse.Namespace) -> bool:
    config = config_of(row, arguments.nproc, arguments.steps, arguments.model)
    task = load_task(config)
    task.prepare(config)  # once, outside of what is timed
    speeds: dict[str, list[float]] = {"ours": [], "native": []}
    difference = 0.0
    for number in range(arguments.rounds):
        timings: dict[str, Timing] = {}
        for name in ("ours", "native") if number % 2 == 0 else ("native", "ours"):
            call = (ours, config) if name == "ours" else (native, config, row)
            timings[name] = launch(*call, nproc=arguments.nproc)[0]
            speeds[name].append(timings[name].samples_per_second)
        pairs = zip(timings["ours"].losses, timings["native"].losses, strict=True)
        difference = max(difference, *(abs(a - b) / abs(b) for a, b in pairs))
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["native"], strict=True)]
    ratio = statistics.median(ratios)
    mine, theirs = statistics.median(speeds["ours"]), statistics.median(speeds["native"])
    spread = f"{ratio:.3f} ({min(ratios):.2f} … {max(ratios):.2f})"
    print(f"{row:<14}{mine:>12.1f}{theirs:>12.1f}{spread:>32}{difference:>14.1e}", flush=True)
    return ratio >= BOUND and math.isfinite(difference) and difference <= LOSS_BOUND


if __name__ == "__main__":
    sys.exit(main())
