"""The clock of one run of benchmarks/peers.py."""

from __future__ import annotations

import json
import os
import time

import psutil

BATCH = 32
"""Rows of a step and rank."""
RATES = {"rows": 3e-5, "lm": 1e-4, "mlm": 1e-4, "seq2seq": 1e-4, "images": 1e-3}
"""Constant learning rate of each job."""
LONGEST = {"rows": 128, "lm": 512, "mlm": 256, "seq2seq": 128, "images": 0}
"""Most tokens of a row, of seq2seq also of a target."""
SIZE = 64
"""Height and width of an image."""
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Clock:
    """CPU and wall seconds from the end of step ``warm``, or of ``lm`` from the start of training,
    to the last step's.

    A language model is trained on all rows once, because packing changes the number of steps.
    """

    def __init__(self, job: str, steps: int) -> None:
        """``steps``: how many the run has without packing."""
        self.warm = 0 if job == "lm" else 3
        self.rows = (steps - self.warm) * BATCH * WORLD
        self.steps, self.done = steps, 0
        self.began = self.ended = (0.0, 0.0)

    def start(self) -> None:
        """Call it when training starts, with rows that are tokenized."""
        self.began = _now()

    def tick(self) -> None:
        """Call it at the end of each step."""
        self.done += 1
        self.ended = _now()
        if self.done == self.warm:
            self.began = self.ended

    def show(self) -> None:
        """Print the seconds per 1,000 rows of all ranks, in one line of JSON; CPU seconds are
        those of this rank.
        """
        cpu, wall = (
            (end - begin) / self.rows * 1000
            for begin, end in zip(self.began, self.ended, strict=True)
        )
        print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)


def _now() -> tuple[float, float]:
    """Return CPU seconds, with those of processes that load rows or compile, and
    seconds on the clock.
    """
    spent = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            spent += sum(child.cpu_times()[:2])
        except psutil.Error:  # it has ended
            continue
    return spent, time.perf_counter()
