"""Compare the step of a head over a large vocabulary, in chunks and from whole
logits: time and memory.

    python benchmarks/chunked_cross_entropy.py [--words 150000] [--size 256]
    [--rows 2048] [--repeat 3]

A step is the loss of all rows and its gradients, in one process with one thread. Time is the
shortest of the repeated steps. Memory is the peak of what torch allocates during a step, beyond the
inputs.

Bounds: 0.10 of the memory and 1.0 of the time of whole logits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.profiler import ProfilerActivity, profile

from distcore_tasks.shared.chunked_cross_entropy.function import summed_cross_entropy

IGNORED, MEMORY, TIME = -100, 0.10, 1.0
MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, default=150_000)
    parser.add_argument("--size", type=int, default=256, help="of a hidden state")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument(
        "--frozen", action="store_true", help="train no weight of the head, as with LoRA"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(given.rows, given.size),
        torch.randn(given.words, given.size) * 0.02,
    )
    hidden.requires_grad_(), weight.requires_grad_(not given.frozen)
    labels = torch.randint(0, given.words, (given.rows,))
    measured = {}
    print("| cross entropy | seconds | MiB |\n|---|---|---|")
    for name, loss in (("whole", whole), ("in chunks", in_chunks)):
        measured[name] = figures(
            partial(loss, hidden, weight, labels), given.repeat, given.precision
        )
        hidden.grad = weight.grad = None
        print(f"| {name} | {measured[name][0]:.2f} | {measured[name][1] / MIB:.0f} |", flush=True)
    seconds, memory = (
        own / all_ for own, all_ in zip(measured["in chunks"], measured["whole"], strict=True)
    )
    print(
        f"\n{given.words:,} words, {given.rows:,} rows: {seconds:.2f} of the time, {memory:.3f} of"
        " the memory"
    )
    return int(seconds > TIME or memory > MEMORY)


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(
        linear(hidden, weight).float(), labels, reduction="sum", ignore_index=IGNORED
    )


def in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return summed_cross_entropy(hidden, weight, None, labels, 0.0, IGNORED)


def figures(loss: Callable[[], Tensor], repeat: int, precision: str) -> tuple[float, int]:
    """Return the seconds of a step, and the bytes of its peak."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            total = loss()
        torch.autograd.backward(total)

    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return min(times), peak(profiled)


def peak(profiled: Any) -> int:
    """Return the largest sum of the profiled allocations."""
    most = now = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


if __name__ == "__main__":
    sys.exit(main())
