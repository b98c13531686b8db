"""Measure laws 6 and 7: kill runs with SIGKILL at random moments, and resume them.

``kills``: real runs of ``single``, ``ddp`` and ``fsdp`` are killed, every second time inside a
save, and started again with ``--resume auto``, until each has taken its share of the kills.
``restarts``: under ``--max-restarts`` random ranks of one job are killed; the time from each kill
to the next step that is logged is taken, and the steps that are trained again.

Bounds: no resume and no restart fails; the final weights are bit for bit those of an undisturbed
run; a restart takes 10 s or less, and at most one step is trained again, because the rank that is
left saves the last one.

    python benchmarks/kill_resume.py [--kills 100] [--restarts 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from distcore import RunConfig, checkpoint, launch, registry, train
from distcore.errors import print_uncaught_on_one_line
from distcore.testing.problem import Problem

STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2}
"""Strategy to number of ranks."""
STEPS = 60
ALLOWED = 10.0
"""Most seconds from a kill to the next step."""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class Slow(Problem):
    """The problem with 0.03 s of sleep per step, so that a run lasts long enough to be killed."""

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sleep, then compute the loss."""
        time.sleep(0.03)
        return super().loss(model, batch)


def job(strategy: str, nproc: int, out: str) -> None:
    """Train ``STEPS`` steps, with a checkpoint after every second one: this process gets killed."""
    settings: dict[str, Any] = {
        "strategy": strategy,
        "out": out,
        "resume": "auto",
        "device": "cpu",
        "global_batch_size": 12,
        "max_steps": STEPS,
        "lr": 0.01,
        "save_every": 2,
        "log_every": 1,
        "checkpoints": {"best": None},
        "extensions": {"progress": False},
        "log_level": "error",
    }
    config = RunConfig(**settings)
    print_uncaught_on_one_line()
    launch(train_slowly, config, nproc=nproc, errors=Path(out, "errors"))


def train_slowly(config: RunConfig) -> None:
    """Train in one rank."""
    train(config, Slow(dropout=0.1))


def start(strategy: str, out: Path) -> subprocess.Popen[str]:
    """Start a run in a new process."""
    command = [sys.executable, "-W", "ignore", __file__, "--job", strategy, str(out)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def is_writing(out: Path) -> bool:
    """Return True while the run writes a checkpoint."""
    return any((out / "checkpoints").glob(".writing-*"))


def content(metrics: Path) -> bytes:
    """Return the log of the run so far."""
    return metrics.read_bytes() if metrics.exists() else b""


def run_and_kill(strategy: str, out: Path, chance: random.Random, in_save: bool) -> str | None:
    """Start the run and kill it at a random moment; return its error output if
    it failed before that.
    """
    process = start(strategy, out)
    metrics = out / "metrics.jsonl"
    wait_for_step(metrics, content(metrics), process)
    time.sleep(chance.random() * 0.5)
    while in_save and process.poll() is None and not is_writing(out):
        pass
    time.sleep(chance.random() * 0.02)
    process.kill()
    _, output = process.communicate(timeout=60)
    return None if process.returncode in (0, -signal.SIGKILL) else output.strip()


def kill_series(strategy: str, kills: int, folder: Path, seed: int) -> list[str]:
    """Kill and resume runs of one strategy, then compare final weights; return the problems."""
    problems: list[str] = []
    whole, disturbed = folder / strategy / "whole", folder / strategy / "killed"
    done = 0
    while done < kills:  # a run is over after 8 kills at most; then the next one starts
        out = disturbed.with_name(f"killed-{len(list(disturbed.parent.glob('killed-*')))}")
        chance = random.Random(f"{seed} {done}")
        for _ in range(min(8, kills - done)):
            if problem := run_and_kill(strategy, out, chance, in_save=done % 2 == 0):
                problems.append(f"{strategy}, kill {done}: {problem}")
            done += 1
        problems += finish(strategy, out)
    problems += finish(strategy, whole)
    reference = checkpoint.read_tensors(whole / f"checkpoints/step-{STEPS:08d}")
    for out in disturbed.parent.glob("killed-*"):
        tensors = checkpoint.read_tensors(out / f"checkpoints/step-{STEPS:08d}")
        if not all(torch.equal(tensors[name], reference[name]) for name in reference):
            problems.append(f"{strategy}: {out.name} ended with other weights")
    return problems


def finish(strategy: str, out: Path) -> list[str]:
    """Let the run train to its end; return the problems."""
    process = start(strategy, out)
    _, output = process.communicate(timeout=300)
    return [] if process.returncode == 0 else [f"{strategy}: the resume failed: {output.strip()}"]


def restart_series(
    restarts: int, folder: Path, seed: int
) -> tuple[list[float], list[int], str | None]:
    """Kill ranks of one job; return, for each kill, the seconds to the next step and the steps
    that are trained again.

    The last value says what went wrong.
    """
    data, out = folder / "rows.json", folder / "restarted"
    data.write_text(
        json.dumps([[f"{'good' if n % 2 else 'bad'} text {n}", n % 2] for n in range(64)])
    )
    flags = (
        f"--data {data} --out {out} --model bert-tiny --global-batch-size 8 --epochs 100000"
        f" --save-every 500 --log-every 1 --strategy ddp --nproc 2 --max-restarts {restarts} --set"
        " device=cpu --set eval_at_epoch_end=false --set extensions.progress=false --set"
        " checkpoints.best=null"
    )
    command = [sys.executable, "-m", "distcore", "train", *flags.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    metrics, seconds, again, chance = (
        out / "metrics.jsonl",
        list[float](),
        list[int](),
        random.Random(seed),
    )
    wait_for_step(metrics, b"", process)
    for _ in range(restarts):
        time.sleep(1 + chance.random())
        ranks = psutil.Process(process.pid).children()
        chance.choice(ranks).kill()
        psutil.wait_procs(ranks, timeout=20)
        since, before = time.monotonic(), content(metrics)
        if not wait_for_step(metrics, before, process):
            break
        seconds.append(time.monotonic() - since)
        again.append(1 + last_step(before) - last_step(content(metrics)))
    problem = (
        None if process.poll() is None else (process.stderr and process.stderr.read()) or "it ended"
    )
    process.terminate()
    process.communicate(timeout=60)
    return seconds, again, problem


def last_step(lines: bytes) -> int:
    """Return the step of the last whole line of metrics.jsonl."""
    return int(json.loads(lines[: lines.rindex(b"\n")].splitlines()[-1])["step"])


def wait_for_step(metrics: Path, before: bytes, process: subprocess.Popen[str]) -> bool:
    """Wait until the file is no more as it was ``before``; False if the process ends before that.

    It may become shorter: the first line of a resumed run replaces those of the
    steps that were lost.
    """
    while content(metrics) == before:
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def main() -> int:
    """Run both series; return 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments at which to kill")
    parser.add_argument("--job", nargs=2, metavar=("STRATEGY", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        strategy, out = arguments.job
        job(strategy, STRATEGIES[strategy], out)
        return 0
    installed = [name for name in STRATEGIES if name in registry.offers("strategies")]
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in installed if arguments.kills else []:
            kills = -(-arguments.kills // len(installed))
            problems_of_it = kill_series(strategy, kills, Path(folder), arguments.seed)
            print(f"{strategy}: {kills} kills, {len(problems_of_it)} problems", flush=True)
            problems += problems_of_it
        if arguments.restarts:
            seconds, again, problem = restart_series(
                arguments.restarts, Path(folder), arguments.seed
            )
            print(
                f"restarts: {len(seconds)} of {arguments.restarts}, seconds from kill to next step:"
                f" median {statistics.median(seconds or [0]):.1f}, largest"
                f" {max(seconds, default=0):.1f}; steps trained again: {max(again, default=0)} at"
                " most"
            )
            problems += [f"restarts: {problem}"] if problem else []
            problems += ["a restart took too long"] if max(seconds, default=0) > ALLOWED else []
            problems += ["steps were lost"] if max(again, default=0) > 1 else []
    print(
        "\n".join(problems)
        or "no resume failed; all final weights equal those of undisturbed runs bit for bit"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
