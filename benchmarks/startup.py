"""Time from the command to the end of the first step, under distcore and in a plain script, in turns.

    python benchmarks/startup.py --data emotion.json [--rounds 5]

The job of benchmarks/seed_job.py with bert-small, one thread per process: alone, and on two ranks (the script under
torchrun). distcore runs with its cache warm, so that rows are not tokenised again, and cold. The script
(benchmarks/native/startup_script.py) tokenises all rows, too. The main figure is CPU seconds of all processes up to
the first step's end, which other work on the machine changes less than the time on the clock; both are printed.

Bounds: of the script's CPU time, warm at most 0.9, cold at most all; two ranks 0.7 of the script under torchrun.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import seed_job

from distcore import hookimpl

FIRST = "DISTCORE_FIRST_STEP"
"""Environment variable: the file that gets the time of the first step's end."""
BOUNDS = {"warm, 1 process": 0.9, "cold, 1 process": 1.0, "warm, 2 ranks": 0.7}


class FirstStep:
    """An extension of distcore that writes when the first step is done."""

    @hookimpl
    def on_step_end(self) -> None:
        """Write the time of the first call."""
        if (file := Path(os.environ[FIRST])) and not file.exists():
            file.write_text(repr(time.time()), encoding="utf-8")


def main() -> int:
    """Run the rounds and print the table; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="JSON: a list of [text, label], labels 0 to 5")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        os.environ.update(TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", OMP_NUM_THREADS="1")
        os.environ["DISTCORE_CACHE"] = str(folder / "warm")
        try:
            seed_job.split(arguments.data, folder)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        model = seed_job.with_new_head(folder, seed_job.pretrained(folder, "bert-small", 1), 0)
        found = measured(folder, model, arguments.rounds)
    held = [show(name, found, bound) for name, bound in BOUNDS.items()]
    print("bounds", "held" if all(held) else "BROKEN")
    return 0 if all(held) else 1


def measured(folder: Path, model: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return CPU and wall seconds of each run, by its name; the first round warms caches and does not count."""
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for ranks in (1, 2):
            script = f"script, {ranks}"
            found.setdefault(script, []).append(until_first_step(folder, script_command(folder, model, ranks)))
            for state in ("warm", "cold") if ranks == 1 else ("warm",):
                name = f"{state}, {ranks} {'process' if ranks == 1 else 'ranks'}"
                cache = folder / ("warm" if state == "warm" else f"cold-{number}")
                command = our_command(folder, model, ranks, number)
                found.setdefault(name, []).append(until_first_step(folder, command, DISTCORE_CACHE=str(cache)))
    return {name: runs[1:] for name, runs in found.items()}


def script_command(folder: Path, model: Path, ranks: int) -> list[str]:
    """Return the command of the script, alone or under torchrun."""
    script = [str(Path(__file__).parent / "native/startup_script.py"), str(model), str(folder / "train.json")]
    torchrun = [str(seed_job.BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    return [*([sys.executable] if ranks == 1 else torchrun), *script, str(folder / "first")]


def our_command(folder: Path, model: Path, ranks: int, number: int) -> list[str]:
    """Return the command of distcore; its run would go on for an epoch."""
    strategy = ["--strategy", "single" if ranks == 1 else "ddp", "--nproc", str(ranks)]
    data = ["--data", str(folder / "train.json"), "--eval-data", str(folder / "kept.json")]
    job = ["--model", str(model), "--global-batch-size", str(32 * ranks), "--lr", "3e-5"]
    out = ["--out", tempfile.mkdtemp(prefix=f"run-{number}-", dir=folder) + "/run"]
    return [seed_job.DISTCORE, "train", *strategy, *job, *data, *out, "--set", f"extensions.{__file__}:FirstStep=true"]


def until_first_step(folder: Path, command: Sequence[str], **environment: str) -> tuple[float, float]:
    """Return CPU and wall seconds from the command to the end of the first step; exits with the output if it fails."""
    first, log = folder / "first", folder / "log"
    first.unlink(missing_ok=True)
    began = time.time()
    with log.open("w") as file:
        process = psutil.Popen(
            command,
            env={**os.environ, **environment, FIRST: str(first)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    while not first.exists() or not first.read_text(encoding="utf-8"):
        if process.poll() is not None and not first.exists():
            sys.exit(f"{' '.join(command)}\n{log.read_text()}")
        time.sleep(0.01)
    spent = cpu_seconds(process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return spent, float(first.read_text(encoding="utf-8")) - began


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and all below it, until now."""
    spent = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent += times.user + times.system + times.children_user + times.children_system
    return spent


def medians(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each of the two figures of ``runs``."""
    return statistics.median(cpu for cpu, _ in runs), statistics.median(wall for _, wall in runs)


def show(name: str, found: dict[str, list[tuple[float, float]]], bound: float) -> bool:
    """Print one line of the table; True if its bound holds."""
    ours, script = found[name], found[f"script, {name.split(', ')[1][0]}"]
    (cpu, wall), (their_cpu, their_wall) = (
        [statistics.median(c) for c in zip(*runs, strict=True)] for runs in (ours, script)
    )
    between = f"({min(one[0] for one in ours):.1f} … {max(one[0] for one in ours):.1f})"
    theirs = f"({min(one[0] for one in script):.1f} … {max(one[0] for one in script):.1f})"
    print(
        f"{name:<16} CPU {cpu:5.1f} s {between:<15} script {their_cpu:5.1f} s {theirs:<15} {cpu / their_cpu:.2f}"
        f" (bound: {bound}); on the clock {wall:.1f} s of {their_wall:.1f} s"
    )
    return bool(cpu / their_cpu <= bound)


if __name__ == "__main__":
    sys.exit(main())
