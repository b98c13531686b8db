"""Measure a run that streams very many rows with labels: the memory that they take, and how long a
step waits for them.

    python benchmarks/many_labels.py [--rows 100000000] [--files 16] [--ranks 2] [--label class]

Writes JSON lines with a class (or, with ``--label number``, a number) each, 4.9 GB, and indexes
them. Then a tiny text classifier trains on them for 40 steps of 256 rows, and evaluates and saves
at steps 20 and 40; another run goes on from there to step 60. The same runs of 20,000 rows tell
what a run takes anyway. ``start`` begins with a pass over all
labels. ``all``: MiB of all processes together at their peak, what they share counted once (PSS):
the launcher and the ranks. ``own``: what of these is no part of a file, which a system
may drop (anonymous memory).
``data``: milliseconds that a step waits for its rows, the median of means of ten steps.

Bounds: 1e8 rows take at most 200 MiB more than few, of all memory, and a step waits at most 200 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

FEW = 20_000
LINES = {
    "class": '{"text": "row %09d of many", "label": "c%d"}\n',
    "number": '{"text": "row %09d of many", "label": %d.5}\n',
}
RUNS = {
    "start": ["--max-steps", "40"],
    "resume": ["--max-steps", "60", "--resume", "auto", "--resume-changed", "max_steps"],
}
LOOK = 0.25
"""Seconds between two looks at the memory."""
DISTCORE = [sys.executable, "-m", "distcore"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--label", choices=LINES, default="class")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"DISTCORE_CACHE": f"{name}/cache", "OMP_NUM_THREADS": "1"}
        print(f"{'rows':>11} {'run':7} {'seconds':>8} {'all MiB':>8} {'own MiB':>8} {'data ms':>8}")
        few, many = (runs(Path(name), rows, asked) for rows in (FEW, asked.rows))
    more = {run: many[run][0] - few[run][0] for run in few}
    print(
        f"{asked.rows:,} rows take {more['start']:.0f} MiB at the start, and {more['resume']:.0f}"
        " MiB in a resume"
    )
    slow = max(wait for *_, wait in many.values()) > 200
    raise SystemExit("a bound does not hold" if slow or max(more.values()) > 200 else 0)


def runs(
    folder: Path, rows: int, asked: argparse.Namespace
) -> dict[str, tuple[float, float, float]]:
    """Print and return the memory of both runs, all and own, and what a step waits for its rows."""
    data, out = folder / f"rows-{rows}", folder / f"run-{rows}"
    write(data, rows, asked.files, LINES[asked.label])
    time.sleep(2.5)  # a younger file may still change within a tick of its file system's clock
    subprocess.run([*DISTCORE, "index", str(data)], check=True, stdout=subprocess.DEVNULL)
    command = [
        *DISTCORE,
        "train",
        "--task",
        "text-classification",
        "--stream",
        "true",
        "--data",
        str(data),
    ]
    command += ["--model", "bert-tiny", "--max-seq-len", "16", "--eval-fraction", str(100 / rows)]
    command += ["--problem-type", "regression"] if asked.label == "number" else []
    command += [
        "--strategy",
        "ddp",
        "--nproc",
        str(asked.ranks),
        "--device",
        "cpu",
        "--global-batch-size",
        "256",
    ]
    command += ["--eval-every", "20", "--save-every", "20", "--out", str(out)]
    answers = {}
    for run, flags in RUNS.items():
        start = time.perf_counter()
        own, every = peaks([*command, *flags])
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        waits = [line["train/data_seconds"] * 100 for line in lines if "train/data_seconds" in line]
        answers[run] = every, own, wait = every, own, median(waits)
        print(
            f"{rows:11} {run:7} {time.perf_counter() - start:8.0f} {every:8.0f} {own:8.0f}"
            f" {wait:8.1f}",
            flush=True,
        )
    return answers


def write(folder: Path, rows: int, files: int, line: str) -> None:
    folder.mkdir()
    for number in range(files):
        with (folder / f"{number:05}.jsonl").open("w") as file:
            for row in range(number * rows // files, (number + 1) * rows // files):
                file.write(line % (row, row % 1009 % 5))


def peaks(command: list[str]) -> tuple[float, float]:
    """Run a command, and return the largest sum over its processes of their own memory, and
    of all, in MiB.
    """
    looks = list[tuple[float, float]]()
    with tempfile.TemporaryFile("w+") as said:
        program = subprocess.Popen(command, stdout=said, stderr=said)
        while program.poll() is None:
            every, own = zip(*map(memory_of, family(program.pid)), strict=True)
            looks.append((sum(own), sum(every)))
            time.sleep(LOOK)
        if program.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)}:\n{said.read()}")
    # What a process shares with another that ends within a look counts twice there.
    own, every = (max(map(min, pairwise(some))) for some in zip(*looks, strict=True))
    return own, every


def memory_of(process: int) -> tuple[float, float]:
    """Return a process's memory, its share of what is shared with others included, and how much is
    in no file; MiB.
    """
    with suppress(OSError, TypeError):  # it ends just now
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        every, own = (
            int(re.search(rf"^{name}: +(\d+)", text, re.M)[1]) / 1024  # type: ignore[index]
            for name in ("Pss", "Pss_Anon")
        )
        return every, own
    return 0.0, 0.0


def family(process: int) -> list[int]:
    """Return a process and all that it started."""
    parents = dict[int, int]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ends just now
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    some = {process}
    while more := {child for child, parent in parents.items() if parent in some} - some:
        some |= more
    return [*some]


if __name__ == "__main__":
    main()
