"""One run of a job of benchmarks/peers.py under distcore; each rank prints its seconds per
1,000 rows as JSON.

    python benchmarks/peer_runs/with_distcore.py JOB distcore FOLDER DATA STEPS fp32|bf16 KEYS
    alone, or under torchrun

KEYS is a JSON object of config keys: ``{}`` for the defaults, but for the arithmetic that all
libraries have in common.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from clock import BATCH, LONGEST, RATES, SIZE, WORLD, Clock

from distcore import RunConfig, hookimpl, train

TASKS: dict[str, dict[str, Any]] = {
    "rows": {"task": "text-classification", "eval_fraction": 0.001},
    "lm": {"task": "causal-lm"},
    "mlm": {"task": "masked-lm", "eval_fraction": 0.001, "split_texts": False},
    "seq2seq": {
        "task": "seq2seq",
        "eval_fraction": 0.001,
        "prefix": "",
        "max_target_len": LONGEST["seq2seq"],
    },
    "images": {
        "task": "image-classification",
        "eval_fraction": 0.02,
        "image_size": SIZE,
        "augment": {"shift": 0.0},
    },
}


class Ticks:
    """An extension that tells the program's clock of start and steps."""

    @hookimpl
    def on_run_start(self) -> None:
        sys.modules["__main__"].CLOCK.start()

    @hookimpl
    def on_step_end(self) -> None:
        sys.modules["__main__"].CLOCK.tick()


def main(
    job: str, library: str, folder: str, data: str, steps: str, precision: str, keys: str
) -> None:
    """Train, and print the seconds."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "data": data,
        "model": folder,
        "global_batch_size": BATCH * WORLD,
        "lr": RATES[job],
        "max_steps": int(steps),
        "optimizer": {"weight_decay": 0.01},
        "strategy": "ddp" if WORLD > 1 else "single",
        "precision": precision,
        "device": "cpu",
        "schedule": {"name": "constant"},
        "clip": {"norm": None},
        "checkpoints": {"best": None},
        "extensions": {"progress": False, f"{__file__}:Ticks": True},
    }
    settings |= {"max_seq_len": LONGEST[job]} if LONGEST[job] else {}
    settings |= {"eval_data": data} if job == "lm" else {}
    with tempfile.TemporaryDirectory() as out:
        train(RunConfig(**settings | TASKS[job] | {"out": f"{out}/run"} | json.loads(keys)))
    CLOCK.show()


if __name__ == "__main__":
    CLOCK = Clock(sys.argv[1], int(sys.argv[5]))
    main(*sys.argv[1:])
