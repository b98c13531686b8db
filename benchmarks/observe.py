"""Measure what the extension ``observe`` costs: CPU time per step, and communication.

    python benchmarks/observe.py [--steps 400] [--rounds 7]

The job is Linear(64, 64) in 2 micro-batches of 16 rows, one thread, one process, a log line every
10 steps: a step so small that the extension is what is measured. Runs with and without it
alternate. The figure is the CPU time per step in
the best round, with it less without it: what else the machine does only adds. It is compared with
the CPU time of a step of an encoder of the size of bert-tiny (2 layers of 128) on 32 rows of 32
tokens, in plain PyTorch.

Bounds: the extension adds at most 0.01 of that step; sums over ranks and gathers are as
many as without it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from distcore import Datasets, Direction, Progress, Run, RunConfig, hookimpl, train

ROWS, WIDTH, WARM = 32, 64, 20
BOUND = 0.01
CALLS = "calls.txt"


class Data:
    """Random inputs and targets, as a distcore dataset."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(rows, WIDTH, generator=generator)
        self.targets = torch.randn(rows, WIDTH, generator=generator)
        self.lengths = np.full(rows, 7, dtype=np.int64)
        self.items = np.ones(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``."""
        rows = torch.from_numpy(indices)
        return {"inputs": self.inputs[rows], "targets": self.targets[rows]}


class Job:
    """The job as a task, which also measures its run."""

    metrics: ClassVar[dict[str, Direction]] = {"loss": "min"}

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds = 0.0

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the data."""
        few = Data(ROWS)
        return Datasets(train=Data(ROWS * self.steps), evaluation=few, test=few)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Build the model."""
        return nn.Linear(WIDTH, WIDTH)

    def row_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of each row."""
        return mse_loss(model(batch["inputs"]), batch["targets"], reduction="none").mean(1)

    @hookimpl
    def on_step_end(self, progress: Progress) -> None:
        """Note the CPU time of all steps but the first ones."""
        if progress.step in (WARM, self.steps):
            self.seconds = time.process_time() - self.seconds


class Counter:
    """Counts the communication of a run, as an extension that the run reads from this file."""

    def __init__(self) -> None:
        self.calls = 0

    @hookimpl(wrapper=True)
    def reduce_loss(self) -> Generator[None, Tensor, Tensor]:
        """Count a sum over ranks."""
        self.calls += 1
        return (yield)

    @hookimpl(wrapper=True)
    def gather_outputs(self) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        """Count a gather."""
        self.calls += 1
        return (yield)

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        """Leave the number in the run folder."""
        Path(str(run.config.out), CALLS).write_text(str(self.calls))


def measure(steps: int, observed: bool) -> tuple[float, int]:
    """Train, and return the CPU seconds of a step and how often ranks communicate in all."""
    job = Job(steps)
    with tempfile.TemporaryDirectory() as folder, silence():
        out = Path(folder, "run")
        config = RunConfig(
            out=str(out),
            max_steps=steps,
            global_batch_size=ROWS,
            micro_batch_size=ROWS // 2,
            device="cpu",
            lr=1e-3,
            checkpoints={"best": None},
            eval_at_epoch_end=False,
            data_guard_steps=0,
            extensions={
                "progress": False,
                "watchdog": False,
                "observe": observed,
                f"{__file__}:Counter": True,
            },
        )
        train(config, job)
        return job.seconds / (steps - WARM), int((out / CALLS).read_text())


@contextmanager
def silence() -> Iterator[None]:
    """Leave out the lines of a run."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def encoder_step(rounds: int) -> float:
    """Return the CPU seconds of a step of the encoder, the best of so many."""
    layer = nn.TransformerEncoderLayer(128, 2, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer, rows = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(32, 32, 128)
    best = float("inf")
    for _ in range(5 * rounds):
        began = time.process_time()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of a run")
    parser.add_argument("--rounds", type=int, default=7, help="runs with and without the extension")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    best, calls = {False: float("inf"), True: float("inf")}, {}
    for _ in range(arguments.rounds):
        for observed in best:
            seconds, calls[observed] = measure(arguments.steps, observed)
            best[observed] = min(best[observed], seconds)
    added, step = best[True] - best[False], encoder_step(arguments.rounds)
    print("| CPU time | ms |\n|---|---|")
    for what, seconds in {
        "a step, without": best[False],
        "a step, with": best[True],
        "added": added,
        "encoder": step,
    }.items():
        print(f"| {what} | {seconds * 1e3:.4f} |")
    print(f"added: {added / step:.2%} of the encoder's step (bound: {BOUND:.0%})")
    print(f"sums and gathers: {calls[False]} without, {calls[True]} with")
    sys.exit(added > BOUND * step or calls[False] != calls[True])


if __name__ == "__main__":
    main()
