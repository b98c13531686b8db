"""Measure how much of the all-reduce of ``ddp`` is hidden behind the backward pass, by the
size of its buckets.

    python benchmarks/overlap.py [--buckets 1 5 25 100] [--model bert-small] [--precision fp32]
                                 [--steps 30] [--rounds 3]

Each round trains two ranks of one thread once with every size of buckets, in rotating order, and
once while they send
nothing: what a step would take if communication were free. Milliseconds are means over steps of the
best time of each
step over the rounds: the whole step; and, by torch's own clock in rank 0, of the backward
pass that sends its computing, its all-reduce from the first bucket to the last, and what of that is
exposed: behind the last gradient.

Bounds: no other size of buckets has steps more than 5 % shorter than the default's.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
import torch.distributed as dist
from torch.futures import Future

from distcore import Run, RunConfig, hookimpl, launch, load_config, train
from distcore.registry import load_file
from distcore_ddp.strategy import DDPStrategy

BOUND, WARM_UP, RANKS = 0.95, 5, 2
DEFAULT, FREE = DDPStrategy.bucket_mb, 0
"""Sizes of buckets in MiB: the default, and what stands for ranks that send nothing."""
Steps = list[tuple[float, ...]]
"""Milliseconds of each step: total, backward computation, all-reduce, and exposed all-reduce."""


@dataclass
class Clock:
    """An extension that records the milliseconds of each step, by what is measured."""

    latest: ClassVar["Clock | None"] = None
    """The clock of the run in this process."""
    ends: list[float] = field(default_factory=list)
    steps: Steps = field(default_factory=list)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Have DDP take its times in every step, and send nothing where that is asked."""
        Clock.latest, wrapped = self, cast("Any", run.model)
        wrapped._set_ddp_runtime_logging_sample_rate(1)
        if "free" in str(run.config.out):
            wrapped.register_comm_hook(None, unsent)

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        """Record the step that is done."""
        wrapped: Any = run.model
        times = {
            name: value / 1e6
            for name, value in wrapped._get_ddp_logging_data().items()
            if name.endswith("_time")
        }
        exposed = times["backward_comm_time"] - times["backward_compute_comm_overlap_time"]
        self.ends.append(time.perf_counter() * 1e3)
        if len(self.ends) > WARM_UP:
            whole = self.ends[-1] - self.ends[-2]
            self.steps.append(
                (whole, times["backward_compute_time"], times["backward_comm_time"], exposed)
            )


# torch checks these annotations when the hook is registered.
def unsent(_state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Answer for a bucket at once, with the rank's own gradients."""
    done: Future[torch.Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def one(config: RunConfig) -> Steps:
    """Train in one rank; return what was measured of each step."""
    train(config)
    seconds: Steps = load_file("extension", f"{__file__}:Clock").latest.steps
    return seconds


def main() -> int:
    """Measure and print the table; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--buckets", type=int, nargs="+", default=[1, 5, 25, 100], help="MiB")
    parser.add_argument("--model", default="bert-small")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sizes = [*dict.fromkeys([DEFAULT, *arguments.buckets, FREE])]
    rounds: dict[int, list[Steps]] = {size: [] for size in sizes}
    for number in range(arguments.rounds):
        turn = number % len(sizes)
        for size in sizes[turn:] + sizes[:turn]:
            rounds[size].append(measure(size, arguments))
    print(f"{'ms':<18}{'step':>10}{'backward':>12}{'all-reduce':>12}{'exposed':>10}")
    means = {size: best(means_of_size) for size, means_of_size in rounds.items()}
    for size, (step, backward, sent, exposed) in means.items():
        wire = f"{sent:>12.1f}{exposed:>10.1f}" if size != FREE else ""
        sizes_sent = f"{size} MiB" if size != FREE else "nothing sent"
        print(f"{sizes_sent:<18}{step:>10.1f}{backward:>12.1f}{wire}")
    ratio = min(mean[0] for size, mean in means.items() if size != FREE) / means[DEFAULT][0]
    print(f"fastest size against the default: {ratio:.3f} of its time (bound: {BOUND})")
    return 0 if ratio >= BOUND else 1


def best(rounds: list[Steps]) -> list[float]:
    """Return the means over steps of each step's best times over the rounds."""
    steps = [
        [min(values) for values in zip(*same, strict=True)] for same in zip(*rounds, strict=True)
    ]
    return [statistics.mean(values) for values in zip(*steps, strict=True)]


def measure(size: int, arguments: argparse.Namespace) -> Steps:
    """Train on all ranks with buckets of ``size`` MiB; return the steps of rank 0."""
    with tempfile.TemporaryDirectory(suffix="-free" if size == FREE else "") as out:
        config = load_config(
            None,
            {
                "strategy": "ddp",
                "strategy_options": {"bucket_mb": size or DEFAULT},
                "nproc": RANKS,
                "model": arguments.model,
                "device": "cpu",
                "precision": arguments.precision,
                "data": "stdlib-docs",
                "global_batch_size": 32 * RANKS,
                "max_steps": arguments.steps,
                "checkpoints.best": None,
                "data_guard_steps": 0,
                "log_level": "error",
                "out": f"{out}/run",
                "extensions": {"progress": False, "metrics": False, f"{__file__}:Clock": True},
            },
        )
        return launch(one, config, nproc=RANKS)[0]


if __name__ == "__main__":
    sys.exit(main())
