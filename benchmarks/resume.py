"""Measure the cost of a resume: rows read but not trained on (none), and the time to
the first new step.

A run with 400 steps per epoch is resumed in the middle of its epoch, with a dataset that records
which rows are read. Then ``distcore train`` on the embedded dataset is started cold and resumed in
the middle of its first epoch, in turn. Times run from the start of the process to the first line of
metrics.jsonl; figures are medians over rounds.

Bounds: no row is read that is not trained on; a resumed run is at its first new step within 1.2
times a cold start.

    python benchmarks/resume.py [--rounds 3] [--model bert-small]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from distcore import Datasets, RunConfig, train
from distcore.testing.problem import Problem, RandomRows

ALLOWED = 1.2
"""Longest time to the first step of a resumed run, in cold starts."""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class RecordingRows(RandomRows):
    """Rows that record which of them were read."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Record the rows, and return them."""
        self.read += indices.tolist()
        return super().batch(indices)


class RecordingProblem(Problem):
    """The laws' problem on rows that record reads."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "rows_with_record", RecordingRows(3200))

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the datasets with the recording rows."""
        return replace(super().prepare(config), train=self.rows_with_record)  # type: ignore[attr-defined]


def rows_read(out: Path, epochs: int) -> tuple[int, int]:
    """Return the number of rows read by a whole run, and by a run that resumes from its middle."""
    counts = []
    for resume in (None, str(out / "checkpoints/step-00000200")):
        task = RecordingProblem()
        config = RunConfig(
            out=str(out),
            global_batch_size=8,
            epochs=epochs,
            save_every=200,
            lr=0.01,
            device="cpu",
            resume=resume,
            extensions={"progress": False, "metrics": False},
            log_level="error",
            checkpoints={"keep_last": 9},
            data_guard_steps=0,  # which reads the rows of the first steps twice
        )
        train(config, task)
        counts.append(len(task.rows_with_record.read))  # type: ignore[attr-defined]
    return counts[0], counts[1]


def seconds_to_first_step(out: Path, model: str, *more: str) -> float:
    """Start ``distcore train``, wait for its first logged step, and kill it."""
    metrics = out / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    start = time.monotonic()
    process = run(out, model, "--log-every", "1", *more)
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"the run ended: {process.stderr and process.stderr.read()}")
        time.sleep(0.005)
    seconds = time.monotonic() - start
    process.kill()
    process.communicate()
    return seconds


def run(out: Path, model: str, *more: str) -> subprocess.Popen[str]:
    """Start ``distcore train`` in a new process."""
    flags = (
        f"--out {out} --model {model} --save-every 10 --set extensions.progress=false --set"
        " device=cpu"
    )
    command = [sys.executable, "-m", "distcore", "train", *flags.split(), *more]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )


def prepare_killed_run(out: Path, model: str) -> None:
    """Fill a run folder with a run that is killed after its first checkpoint, at step 10."""
    process = run(out, model)
    while not list(out.glob("checkpoints/step-*")) and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.communicate()


def main() -> int:
    """Print the figures; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="bert-small")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = rows_read(Path(folder, "rows"), epochs=1)
        print(
            f"rows read: {whole} by the whole run, {resumed} by the one resumed after 1600 of 3200"
        )
        prepare_killed_run(Path(folder, "resumed"), arguments.model)
        cold: list[float] = []
        again: list[float] = []
        for _ in range(arguments.rounds):
            shutil.rmtree(Path(folder, "cold"), ignore_errors=True)
            cold.append(seconds_to_first_step(Path(folder, "cold"), arguments.model))
            again.append(
                seconds_to_first_step(Path(folder, "resumed"), arguments.model, "--resume", "auto")
            )
    ratio = statistics.median(again) / statistics.median(cold)
    print(
        f"first step: cold {statistics.median(cold):.2f} s, resumed {statistics.median(again):.2f}"
        f" s: {ratio:.2f} x"
    )
    return 0 if ratio <= ALLOWED and resumed == whole - 1600 else 1


if __name__ == "__main__":
    sys.exit(main())
