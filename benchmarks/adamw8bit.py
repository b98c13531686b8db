"""Compare adamw8bit with adamw: bytes of state for a parameter, and the distance of the losses.

    python benchmarks/adamw8bit.py [--lr 1e-4] [--steps 30] [--model bert-tiny]

Both train ``examples/demo.yaml`` in one process. The bytes are those of the optimizer's state after
a step on the meta device, as ``distcore plan`` counts them. The distance is that of each step's
loss, relative to adamw's.

Bounds: 2.1 bytes a parameter; a distance of 2e-5 in every step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from distcore import RunConfig, footprint, load_config, train
from distcore.model.model_source import model_source
from distcore.model.optim import optimizer_factory
from distcore.resolve.resolve import resolve

DEMO = Path(__file__).parents[1] / "examples/demo.yaml"
BYTES, DISTANCE = 2.1, 2e-5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="bert-tiny")
    given = parser.parse_args()
    losses, sizes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("adamw", "adamw8bit"):
            changes = {
                "strategy": "single",
                "nproc": 1,
                "lr": given.lr,
                "max_steps": given.steps,
                "log_every": 1,
                "model": given.model,
                "optimizer.name": name,
                "out": f"{folder}/{name}",
                "device": "cpu",
            }
            config = load_config(str(DEMO), changes)
            train(config)
            lines = Path(folder, name, "metrics.jsonl").read_text().splitlines()
            losses[name] = [
                line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line
            ]
            sizes[name] = bytes_of_state(config)
    apart = [
        abs(own - whole) / whole
        for own, whole in zip(losses["adamw8bit"], losses["adamw"], strict=True)
    ]
    print(
        "| optimizer | bytes a parameter | distance of the loss, mean | largest"
        " |\n|---|---|---|---|"
    )
    print(f"| adamw | {sizes['adamw']:.3f} | | |")
    print(
        f"| adamw8bit | {sizes['adamw8bit']:.3f} | {sum(apart) / len(apart):.1e} |"
        f" {max(apart):.1e} |"
    )
    return int(sizes["adamw8bit"] > BYTES or max(apart) > DISTANCE)


def bytes_of_state(config: RunConfig) -> float:
    """Return the bytes that the optimizer keeps, over the number of parameters."""
    resolved = resolve(config)
    data = resolved.task.prepare(resolved.config)
    model = model_source(resolved.config, resolved.task, data).meta_model()
    optimizer = optimizer_factory(resolved.config)(model)
    return footprint.optimizer_bytes(optimizer) / sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
