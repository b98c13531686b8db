"""Time from the command to the end of the first step, under distcore and in a
plain script, in turns.

    python benchmarks/startup.py --data emotion.json [--rounds 5]

The job of benchmarks/seed_job.py with bert-small, one thread per process: alone, and on two ranks
(the script under torchrun). distcore runs with its cache warm, so that rows are not tokenized
again, and cold. The script (benchmarks/native/startup_script.py) tokenizes all rows, too. The main
figure is CPU seconds of all processes up to the first step's end, which other work on the machine
changes less than the time on the clock; both are printed. Then follow the CPU seconds of one warm
process by phase, and the CPU seconds of imports alone.

Bounds: of the script's CPU time, warm and cold at most 0.8; two ranks 0.6 of the script
under torchrun. ``distcore --help`` takes at most 0.12 CPU seconds; ``--help-alone`` measures the
help and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import seed_job
from torch import Tensor, nn

from distcore import World, hookimpl

FIRST = "DISTCORE_FIRST_STEP"
"""Environment variable: the file that gets the time of the first step's end, as JSON, with
the marks before it.
"""
BOUNDS = {"warm, 1 process": 0.8, "cold, 1 process": 0.8, "warm, 2 ranks": 0.6}

HELP = {"--help": 0.12, "train --help": None}
"""Arguments of distcore that print a help, with the most CPU seconds that they may
take; ``None``: no bound.
"""
HELP_ROUNDS = 20
"""Times that each help is printed, since one takes little and varies."""
PARTS = (
    "imports until the command has read its config",
    "data, its fingerprint",
    "the model: its code, its weights",
    "optimizer, schedule, check of padding-free rows, run folder",
    "sanity check of the evaluation",
    "the first step",
)
"""The phase before each mark of ``FirstStep``, in order."""
IMPORTS = (
    "import torch",
    "from transformers import AutoTokenizer, AutoModelForSequenceClassification",
    "import transformers.models.bert.modeling_bert",
    "import distcore.cli.main, distcore.engine.trainer, distcore_tasks.text_classification.task",
    "import transformers.optimization",
)
"""Imports of a run of the job, each after its own dependencies."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a run up to the end of its first step."""

    cpu: float
    """CPU seconds of all processes."""
    wall: float
    """Seconds on the clock."""
    marks: tuple[float, ...] = ()
    """CPU seconds of the process at each mark; the script has none."""


class FirstStep:
    """An extension of distcore that writes when the first step is done, and CPU seconds
    at marks before it.
    """

    def __init__(self) -> None:
        self.marks: list[float] = []

    @hookimpl(wrapper=True)
    def setup(self) -> Generator[None, World, World]:
        """Mark it."""
        self._mark()
        return (yield)

    @hookimpl(wrapper=True)
    def build_model(self) -> Generator[None, nn.Module, nn.Module]:
        """Mark its beginning and its end."""
        self._mark()
        module = yield
        self._mark()
        return module

    @hookimpl
    def on_run_start(self) -> None:
        """Mark it."""
        self._mark()

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Tensor, Tensor]:
        """Mark it."""
        self._mark()
        return (yield)

    @hookimpl
    def on_step_end(self) -> None:
        """Write all marks at the first call, on the rank that is first."""
        self._mark()
        if (file := Path(os.environ[FIRST])) and not file.exists():
            whole = file.with_suffix(f".{os.getpid()}")
            whole.write_text(
                json.dumps({"time": time.time(), "marks": self.marks}), encoding="utf-8"
            )
            whole.rename(file)

    def _mark(self) -> None:
        self.marks.append(time.process_time())


def main() -> int:
    """Run the rounds and print the table; return 0 if the bounds hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="JSON: a list of [text, label], labels 0 to 5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--help-alone", action="store_true", help="measure only what help takes; needs no data"
    )
    arguments = parser.parse_args()
    if arguments.help_alone:
        return conclusion([show_help(words, bound) for words, bound in HELP.items()])
    if arguments.data is None:
        parser.error("--data: name the rows of the job")
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        os.environ.update(TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", OMP_NUM_THREADS="1")
        os.environ["DISTCORE_CACHE"] = str(folder / "warm")
        # a checkout would be compiled at each start
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            seed_job.split(arguments.data, folder)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        model = seed_job.save_with_new_head(
            folder, seed_job.make_pretrained(folder, "bert-small", 1), 0
        )
        runs_by_name = measure(folder, model, arguments.rounds)
    held = [show(name, runs_by_name, bound) for name, bound in BOUNDS.items()]
    show_parts(runs_by_name["warm, 1 process"])
    show_imports(arguments.rounds)
    return conclusion(held + [show_help(words, bound) for words, bound in HELP.items()])


def conclusion(held: Sequence[bool]) -> int:
    """Print if all bounds held; return 0 if they did."""
    print("bounds", "held" if all(held) else "BROKEN")
    return 0 if all(held) else 1


def measure(folder: Path, model: Path, rounds: int) -> dict[str, list[Spent]]:
    """Measure CPU and wall seconds of each run, by its name. The first round warms
    caches, and is dropped.
    """
    runs_by_name: dict[str, list[Spent]] = {}
    for number in range(rounds + 1):
        for ranks in (1, 2):
            script = f"script, {ranks}"
            runs_by_name.setdefault(script, []).append(
                until_first_step(folder, script_command(folder, model, ranks))
            )
            for state in ("warm", "cold") if ranks == 1 else ("warm",):
                name = f"{state}, {ranks} {'process' if ranks == 1 else 'ranks'}"
                cache = folder / ("warm" if state == "warm" else f"cold-{number}")
                command = our_command(folder, model, ranks, number)
                runs_by_name.setdefault(name, []).append(
                    until_first_step(folder, command, DISTCORE_CACHE=str(cache))
                )
    return {name: runs[1:] for name, runs in runs_by_name.items()}


def script_command(folder: Path, model: Path, ranks: int) -> list[str]:
    """Return the command of the script, alone or under torchrun."""
    script = [
        str(Path(__file__).parent / "native/startup_script.py"),
        str(model),
        str(folder / "train.json"),
    ]
    torchrun = [str(seed_job.BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    return [*([sys.executable] if ranks == 1 else torchrun), *script, str(folder / "first")]


def our_command(folder: Path, model: Path, ranks: int, number: int) -> list[str]:
    """Return the command of distcore; its run would go on for an epoch."""
    strategy = ["--strategy", "single" if ranks == 1 else "ddp", "--nproc", str(ranks)]
    data = ["--data", str(folder / "train.json"), "--eval-data", str(folder / "kept.json")]
    job = ["--model", str(model), "--global-batch-size", str(32 * ranks), "--lr", "3e-5"]
    out = ["--out", tempfile.mkdtemp(prefix=f"run-{number}-", dir=folder) + "/run"]
    return [
        *seed_job.DISTCORE,
        "train",
        *strategy,
        *job,
        *data,
        *out,
        "--set",
        f"extensions.{__file__}:FirstStep=true",
    ]


def until_first_step(folder: Path, command: Sequence[str], **environment: str) -> Spent:
    """Run a command to the end of its first step, and return the time. Exits with the
    output if it fails.
    """
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
    while not first.exists():
        if process.poll() is not None and not first.exists():
            sys.exit(f"{' '.join(command)}\n{log.read_text()}")
        time.sleep(0.01)
    spent = cpu_seconds(process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    record = json.loads(first.read_text(encoding="utf-8"))
    return Spent(spent, record["time"] - began, tuple(record["marks"]))


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


def show(name: str, runs_by_name: dict[str, list[Spent]], bound: float) -> bool:
    """Print one line of the table; True if its bound holds."""
    (cpu, wall, between), (their_cpu, their_wall, theirs) = (
        describe(runs_by_name[runs]) for runs in (name, f"script, {name.split(', ')[1][0]}")
    )
    print(
        f"{name:<16} CPU {cpu:5.1f} s {between:<15} script {their_cpu:5.1f} s {theirs:<15}"
        f" {cpu / their_cpu:.2f} (bound: {bound}); on the clock {wall:.1f} s of {their_wall:.1f} s"
    )
    return cpu / their_cpu <= bound


def describe(runs: Sequence[Spent]) -> tuple[float, float, str]:
    """Return medians of CPU and wall seconds, and the range of the first."""
    cpu = [run.cpu for run in runs]
    return (
        statistics.median(cpu),
        statistics.median(run.wall for run in runs),
        f"({min(cpu):.1f} … {max(cpu):.1f})",
    )


def show_parts(runs: Sequence[Spent]) -> None:
    """Print what the parts of a start took, medians over ``runs``."""
    lengths = [[end - begin for begin, end in pairwise((0.0, *run.marks))] for run in runs]
    for part, each in zip(PARTS, zip(*lengths, strict=True), strict=True):
        print(f"{statistics.median(each):6.2f} CPU s: {part}")


def show_help(words: str, bound: float | None) -> bool:
    """Print the CPU seconds of ``distcore WORDS``, median over ``HELP_ROUNDS``;
    True if its bound holds.
    """
    spent = []
    for _ in range(HELP_ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*seed_job.DISTCORE, *words.split()], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    median, limit = statistics.median(spent), "" if bound is None else f" (bound: {bound})"
    print(f"{median:6.3f} CPU s ({min(spent):.3f} … {max(spent):.3f}): distcore {words}{limit}")
    return bound is None or median <= bound


def show_imports(rounds: int) -> None:
    """Print the CPU seconds of each of ``IMPORTS`` in a new process, medians over ``rounds``."""
    code = "import time\nlaps = [time.process_time()]\n" + "".join(
        f"{line}\nlaps.append(time.process_time())\n" for line in IMPORTS
    )
    laps = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", f"{code}print(laps)"], capture_output=True, text=True, check=True
        )
        laps.append(
            [end - begin for begin, end in pairwise(json.loads(done.stdout.splitlines()[-1]))]
        )
    for line, each in zip(IMPORTS, zip(*laps, strict=True), strict=True):
        print(f"{statistics.median(each):6.2f} CPU s: {line}")


if __name__ == "__main__":
    sys.exit(main())
