"""Let ``distcore tune`` find the fastest setting of the seed's job, and compare it with what was tuned by hand.

    python benchmarks/tune_seed.py --data emotion.json [--model bert-small] [--budget 10] [--rounds 3] [--steps 30]

The job is that of benchmarks/seed_job.py with the arithmetic of the published scripts: 9,200 rows, 32 a step, fp32,
3e-5 at a constant rate, no clipping; from random weights, which do not matter to speed. By hand there are: one process
with micro-batches of 8 rows, which docs/speed.md has as "same arithmetic", the same as two ranks under ddp, and the
defaults. All are run in turns, each in a process of its own. The speed of a setting is the median over rounds of its
samples per second, evaluations left out. Nothing else should run on the machine.

Bounds: what tune finds within its budget is at least 0.98 times as fast as the best by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from seed_job import DISTCORE, quiet, split

BOUND = 0.98
JOB = (
    "--global-batch-size", "32", "--lr", "3e-5", "--set", "clip.norm=null", "--set", "schedule.name=constant",
    "--set", "checkpoints.best=null",
)  # fmt: skip
BY_HAND = {
    "one process, 8 rows": ("--strategy", "single", "--nproc", "1", "--micro-batch-size", "8"),
    "ddp on two, 8 rows": ("--strategy", "ddp", "--nproc", "2", "--micro-batch-size", "8"),
    "defaults": (),
}


def main() -> int:
    """Tune, then run all settings in turns; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="JSON: a list of [text, label], labels 0 to 5")
    parser.add_argument("--model", default="bert-small", help="a built-in model, a folder or a hub name")
    parser.add_argument("--budget", default="10", help="minutes for the trials of tune")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tune-seed-") as name:
        folder = Path(name)
        os.environ["DISTCORE_CACHE"] = str(folder / "cache")
        try:
            split(arguments.data, folder)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        data = ("--data", str(folder / "train.json"), "--eval-data", str(folder / "kept.json"))
        job = ("--model", arguments.model, *data, *JOB)
        began = time.monotonic()
        subprocess.run(
            [DISTCORE, "tune", *job, "--budget", arguments.budget, "--out", str(folder / "tuned")], check=True
        )
        print(f"tune took {time.monotonic() - began:.0f} s", flush=True)
        threads = chosen_threads(folder / "tuned")
        speeds: dict[str, list[float]] = {name: [] for name in ("tuned", *BY_HAND)}
        for number in range(arguments.rounds):
            for name in sorted(speeds, reverse=bool(number % 2)):
                own = [str(folder / "tuned/config.yaml")] if name == "tuned" else [*job, *BY_HAND[name]]
                out = folder / f"{name.replace(' ', '-')}-{number}"
                speeds[name].append(run(own, arguments.steps, out, threads if name == "tuned" else None))
        return show(speeds)


def chosen_threads(tuned: Path) -> str | None:
    """Return the threads that tune chose for a rank, if it did."""
    found = json.loads((tuned / "tune.json").read_text(encoding="utf-8"))["chosen"]["setting"].get("threads")
    return str(found) if found else None


def run(arguments: Sequence[str], steps: int, out: Path, threads: str | None) -> float:
    """Train for some steps, and return the samples per second after the first three."""
    before = os.environ.pop("OMP_NUM_THREADS", None)
    if threads:
        os.environ["OMP_NUM_THREADS"] = threads
    try:
        end = ["--max-steps", str(steps), "--set", "extensions.stopwatch=true", "--out", str(out)]
        quiet([DISTCORE, "train", *arguments, *end])
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update({"OMP_NUM_THREADS": before} if before else {})
    found = json.loads((out / "steps.json").read_text(encoding="utf-8"))
    return float((found["samples"][-1] - found["samples"][2]) / sum(found["seconds"][3:]))


def show(speeds: dict[str, list[float]]) -> int:
    """Print the table; return 0 if the bound holds."""
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, found in speeds.items():
        print(f"{name:<22}{medians[name]:>8.1f} samples/s ({min(found):.1f} … {max(found):.1f})")
    ratio = medians["tuned"] / max(medians[name] for name in BY_HAND)
    print(f"tuned is {ratio:.2f} times the best by hand: bound {'held' if ratio >= BOUND else 'BROKEN'}")
    return 0 if ratio >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
