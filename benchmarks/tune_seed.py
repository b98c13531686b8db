"""Let ``distcore tune`` find the fastest setting of the seed's job, and compare it with what
was tuned by hand.

    python benchmarks/tune_seed.py --data emotion.json [--model bert-small] [--budget 4]
    [--rounds 3] [--steps 30]

The job is that of benchmarks/seed_job.py with the arithmetic of the published scripts: 9,200 rows,
32 a step, fp32, 3e-5 at a constant rate, no clipping; from random weights, which do not matter to
speed. By hand there are: one process with micro-batches of 8 rows, which docs/speed.md has as "same
arithmetic", the same as two ranks under ddp, and the defaults. All are run in turns, each in a
process of its own. The speed of a setting has each step as in the round in which it was shortest,
evaluations left out, since other programs only ever make a step longer. Behind it are the range and
the median of whole rounds. Where tune finds one of the settings by hand it is measured once, as
that. Nothing else should run on the machine.

Bounds: what tune finds within five minutes, its own start included, is at least 0.98 times as fast
as the best by hand, each step as in the round in which it was shortest.
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

import yaml
from seed_job import DISTCORE, quiet, split

BOUND = 0.98
MINUTES = 5
JOB = (
    "--global-batch-size",
    "32",
    "--lr",
    "3e-5",
    "--set",
    "clip.norm=null",
    "--set",
    "schedule.name=constant",
    "--set",
    "checkpoints.best=null",
)
BY_HAND = {
    "one process, 8 rows": ("--strategy", "single", "--nproc", "1", "--micro-batch-size", "8"),
    "ddp on two, 8 rows": ("--strategy", "ddp", "--nproc", "2", "--micro-batch-size", "8"),
    "defaults": (),
}


def main() -> int:
    """Tune, then run all settings in turns; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, type=Path, help="JSON: a list of [text, label], labels 0 to 5"
    )
    parser.add_argument(
        "--model", default="bert-small", help="a built-in model, a folder or a hub name"
    )
    parser.add_argument("--budget", default="4", help="minutes for the trials of tune")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tune-seed-") as name:
        folder = Path(name)
        os.environ["DISTCORE_CACHE"] = str(folder / "cache")
        # tune would keep to it, and the settings by hand have none
        os.environ.pop("OMP_NUM_THREADS", None)
        try:
            split(arguments.data, folder)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        data = ("--data", str(folder / "train.json"), "--eval-data", str(folder / "kept.json"))
        job = ("--model", arguments.model, *data, *JOB)
        began = time.monotonic()
        subprocess.run(
            [*DISTCORE, "tune", *job, "--budget", arguments.budget, "--out", str(folder / "tuned")],
            check=True,
        )
        took = time.monotonic() - began
        print(f"tune took {took:.0f} s", flush=True)
        tuned_file, threads = str(folder / "tuned/config.yaml"), read_threads(folder / "tuned")
        settings: dict[str, tuple[list[str], str | None]] = {
            name: ([*job, *flags], None) for name, flags in BY_HAND.items()
        }
        best = resolve_config([tuned_file])
        same = [
            name
            for name, (own, _) in settings.items()
            if not threads and resolve_config(own) == best
        ]
        tuned = same[0] if same else "tuned"
        settings.setdefault(tuned, ([tuned_file], threads))
        rounds: dict[str, list[list[float]]] = {name: [] for name in settings}
        for number in range(arguments.rounds):
            for name in sorted(rounds, reverse=bool(number % 2)):
                own, own_threads = settings[name]
                out = folder / f"{name.replace(' ', '-')}-{number}"
                rounds[name].append(run(own, arguments.steps, out, own_threads))
        return max(show(rounds, tuned), int(took > 60 * MINUTES))


def read_threads(tuned: Path) -> str | None:
    """Return the number of threads that tune chose for a rank, if any."""
    threads = json.loads((tuned / "tune.json").read_text(encoding="utf-8"))["chosen"][
        "setting"
    ].get("threads")
    return str(threads) if threads else None


def resolve_config(arguments: Sequence[str]) -> object:
    """Return the config of a job as it would run."""
    done = subprocess.run(
        [*DISTCORE, "train", *arguments, "--dry-run"], check=True, stdout=subprocess.PIPE, text=True
    )
    return {**yaml.safe_load(done.stdout), "out": None}


def run(arguments: Sequence[str], steps: int, out: Path, threads: str | None) -> list[float]:
    """Train for some steps, and return the seconds per sample of each after the first three."""
    if threads:
        os.environ["OMP_NUM_THREADS"] = threads
    try:
        end = ["--max-steps", str(steps), "--set", "extensions.stopwatch=true", "--out", str(out)]
        quiet([*DISTCORE, "train", *arguments, *end])
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
    log = json.loads((out / "steps.json").read_text(encoding="utf-8"))
    rows = (log["samples"][-1] - log["samples"][2]) / len(log["seconds"][3:])
    return [seconds / rows for seconds in log["seconds"][3:]]


def show(rounds: dict[str, list[list[float]]], tuned: str) -> int:
    """Print the table; return 0 if the bound holds for the setting ``tuned``."""
    shortest: dict[str, float] = {}
    for name, rounds_of_setting in rounds.items():
        speeds = [len(one) / sum(one) for one in rounds_of_setting]
        steps = [min(times) for times in zip(*rounds_of_setting, strict=True)]
        shortest[name] = len(steps) / sum(steps)
        print(
            f"{name:<22}{shortest[name]:>8.1f} samples/s by the shortest steps; whole rounds"
            f" {min(speeds):.1f} … {max(speeds):.1f}, median {statistics.median(speeds):.1f}"
        )
    ratio = shortest[tuned] / max(shortest[name] for name in BY_HAND)
    held = "held" if ratio >= BOUND else "BROKEN"
    print(f"the setting of tune ({tuned}) is {ratio:.2f} times the best by hand: bound {held}")
    return 0 if ratio >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
