"""Run folders as runs leave them, made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from distcore.config import dump_config, load_config


def write_run(folder: Path, steps: int = 100, finished: bool = True, **changes: Any) -> Path:
    """A run folder as a run leaves it: a log line every 10 steps, an evaluation every 50."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        dump_config(load_config(None, {"nproc": 1, "task": "text-classification"} | changes))
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(10, steps + 1, 10):
            how_far = {"step": step, "epoch": step / 50, "samples": step * 32}
            logged = {
                "loss": math.exp(-step / 50),
                "lr": 1e-3 * (1 - step / steps),
                "samples_per_second": 200.0,
                "peak_memory_bytes": 2**28,
                "grad_norm": None if step == 20 else 1.5,
            }
            file.write(
                json.dumps(how_far | {f"train/{name}": value for name, value in logged.items()})
                + "\n"
            )
            if step % 50 == 0:
                reached = {
                    "loss": 0.5,
                    "accuracy": step / 200,
                    "evaluated": 20,
                    "unique": 20,
                    "dataset_size": 20,
                }
                file.write(
                    json.dumps(how_far | {f"eval/{name}": value for name, value in reached.items()})
                    + "\n"
                )
    report = {"steps": steps, "world_size": 1, "train_seconds": 2.5, "samples_per_second": 203.3,
              "peak_memory_bytes": 2**28, "metrics": {"loss": "min", "accuracy": "max"},
              "evaluation": {"loss": 0.2, "accuracy": 0.9, "dataset_size": 20}}  # fmt: skip
    if finished:
        (folder / "report.json").write_text(json.dumps(report))
    return folder


def write_predictions(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
