"""Compare the time of a step of a pipeline on two ranks, with 1f1b and with interleaved stages.

    python benchmarks/interleaved.py [--blocks 8] [--micros 2,4,8] [--steps 20]

The passes of a step through a BERT of width 256, without the optimizer's, on micro-batches of 8
rows of 64 tokens: medians and quartiles, in milliseconds. The schedules take turns in the same
processes.

Bounds: with 2 micro-batches, interleaved, with 2 stages on each rank, takes at most 0.95 of
the time of 1f1b.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from distcore import Batch, MicroBatch, Run, RunConfig, launch
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject
from distcore_mesh.strategy import MeshStrategy

RANKS, MOST = 2, 0.95
INTERLEAVED: dict[str, Any] = {"pp": RANKS, "pp_schedule": "interleaved"}


def main() -> int:
    """Print a line for each schedule and number of micro-batches; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--micros", default="2,4,8")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    held = True
    for micros in map(int, arguments.micros.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            times, *_ = launch(
                measure, Path(folder), arguments.blocks, micros, arguments.steps, nproc=RANKS
            )
        medians = {schedule: statistics.median(taken) for schedule, taken in times.items()}
        for schedule, taken in times.items():
            low, _, high = statistics.quantiles(taken, n=4)
            print(
                f"{micros} micro-batches, {schedule:>14}: {medians[schedule]:.1f} ({low:.1f} to"
                f" {high:.1f}), {medians[schedule] / medians['1f1b']:.2f} of 1f1b"
            )
        held = held and (micros != 2 or medians["interleaved, 2"] <= MOST * medians["1f1b"])
    print(f"bound {MOST}: {'held' if held else 'BROKEN'}")
    return 0 if held else 1


def measure(folder: Path, blocks: int, micros: int, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step of each schedule, in this rank."""
    each = {
        "input_ids": torch.arange(512).view(8, 64) + 3,
        "attention_mask": torch.ones(8, 64, dtype=torch.long),
    }
    rows = np.arange(8)
    batches: list[tuple[MicroBatch, Batch]] = [
        (MicroBatch(indices=rows, last=number == micros - 1), each) for number in range(micros)
    ]
    chunks = [number for number in (2, 4, 8) if blocks % (RANKS * number) == 0]
    options = {"1f1b": {"pp": RANKS}} | {
        f"interleaved, {n}": INTERLEAVED | {"pp_chunks": n} for n in chunks
    }
    config = RunConfig(strategy="mesh", strategy_options={"pp": RANKS}, nproc=RANKS, device="cpu")
    times: dict[str, list[float]] = {schedule: [] for schedule in options}
    with lab_of(Subject(config=config, cases=()), folder) as lab:
        runs = {
            schedule: prepare_run(lab.world, blocks, chosen) for schedule, chosen in options.items()
        }
        for turn in range(steps + 2):
            for schedule in list(runs)[:: 1 if turn % 2 else -1]:
                strategy, run = runs[schedule]
                dist.barrier()
                start = time.perf_counter()
                strategy.train_step(run, batches, loss)
                dist.barrier()
                times[schedule].append(1e3 * (time.perf_counter() - start))
                run.module.zero_grad()
    return {schedule: taken[2:] for schedule, taken in times.items()}


def prepare_run(world: Any, blocks: int, options: dict[str, Any]) -> tuple[Any, Run]:
    """Return the strategy with ``options``, and a run with this rank's part of the model."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=1000,
            hidden_size=256,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            intermediate_size=1024,
        )
    ).train()
    strategy = MeshStrategy(**options)
    run = Run(
        config=RunConfig(device="cpu"),
        world=world,
        capabilities=strategy.capabilities,
        module=model,
        model=model,
    )
    wrapped = strategy.wrap_model(run, model, None)
    return strategy, replace(run, model=wrapped.model, strategy_state=wrapped.state)


def loss(model: nn.Module, _micro: MicroBatch, batch: Batch) -> Tensor:
    """Return a loss that needs no labels."""
    return model(**batch).logits.square().mean()  # type: ignore[no-any-return]


if __name__ == "__main__":
    raise SystemExit(main())
