"""Measure rows by number of a source that is larger than memory: its index, a step, a resume.

    python benchmarks/many_rows.py [--rows 100000000] [--files 16] [--ranks 2]

Writes JSON lines of 34 bytes (3.4 GB), and indexes them as ``distcore index`` does. ``index``:
seconds, and the largest process in MiB. Then so many processes at a time, as ranks of one machine,
go on from the start of an epoch and from 99 % of it: each opens the index, the order and the rows,
and reads its part of 20 steps of 256 rows. ``first``: CPU milliseconds from opening to the rows of
the first step, the slowest rank's; ``step``: wall milliseconds of those after
it. ``read``: MiB that a rank read from files up to the first rows. ``memory``: MiB that all ranks
need more than after their imports, where what they share counts once. Of each the best of 3.

Before that, files of 40,000 texts of some 300 bytes, one of each format: ``first ms`` is the CPU
time from opening, which makes the index, to the first row, for which ``.gz`` and ``.json`` files
are copied; ``row µs`` that of a row in random batches of 32, the best of 5 rounds.

Bounds: a row of JSON lines costs at most 12 µs, one of a gzip file 15. A step takes at most 200 ms,
all memory is at most 200 MiB, and the first rows at 99 % cost at most 1.2 times as much as at the
start, CPU and bytes, and 5 ms and 1 MiB for what a clock and pages are off.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

BATCH, STEPS, ROWS_AT_ONCE = 256, 20, 250_000
ROW_MICROSECONDS = {"jsonl": 12, "jsonl.gz": 15}
"""Bounds of what a row costs, by format."""
LINE = '{"text": "row %09d of many"}\n'
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        rank(**json.loads(asked.rank))
        return
    with tempfile.TemporaryDirectory() as name:
        os.environ["DISTCORE_CACHE"] = f"{name}/cache"
        broken = by_number(Path(name) / "texts")
        folder = Path(name) / "rows"
        write(folder, asked.rows, asked.files)
        time.sleep(2.5)  # a younger file may still change within a tick of its file system's clock
        seconds, most = index(folder)
        print(f"{asked.rows:,} rows in {asked.files} files; index: {seconds:.0f} s, {most:.0f} MiB")
        print(
            f"{'order':8} {'from':>5} {'first ms':>9} {'step ms':>8} {'read MiB':>9}"
            f" {'memory MiB':>11}"
        )
        broken += [
            line for kind in ("full", "windows") for line in measured(folder, kind, asked.ranks)
        ]
    raise SystemExit(f"a bound does not hold: {', '.join(broken)}" if broken else 0)


def by_number(folder: Path) -> list[str]:
    """Print what a row by number costs of each format; return what breaks a bound."""
    from distcore_data import IndexedRows

    folder.mkdir()
    broken = []
    print(f"{'format':10} {'first ms':>9} {'row µs':>7}")
    for file in texts(folder):
        start = time.process_time()
        rows = IndexedRows(file, {"columns.text": "text"})
        rows[[0]]
        first = (time.process_time() - start) * 1e3
        row = min(row_cost(rows) for _ in range(5))
        kind = file.name.removeprefix("texts.")
        print(f"{kind:10} {first:9.0f} {row:7.1f}")
        if row > ROW_MICROSECONDS.get(kind, row):
            broken.append(f"{kind}: row")
    return broken


def row_cost(rows: Any) -> float:
    """Return the CPU microseconds of a row in random batches."""
    import numpy as np

    random = np.random.default_rng(0)
    batches = [random.integers(0, len(rows), 32) for _ in range(100)]
    start = time.process_time()
    for numbers in batches:
        rows[numbers]
    return (time.process_time() - start) / (32 * len(batches)) * 1e6


def texts(folder: Path) -> list[Path]:
    """Write the same texts in several formats; return the files."""
    random = Random(0)
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(1, 9))) for _ in range(5000)]
    rows = [
        {"text": " ".join(random.choices(words, k=45)), "label": number} for number in range(40_000)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = "".join(f"{row['text']},{row['label']}\n" for row in rows)
    contents = {
        "jsonl": lines.encode(),
        "csv": f"text,label\n{table}".encode(),
        "txt": "".join(f"{row['text']}\n" for row in rows).encode(),
        "jsonl.gz": gzip.compress(lines.encode()),
        "json": json.dumps(rows).encode(),
    }
    files = []
    for kind, content in contents.items():
        file = folder / f"texts.{kind}"
        file.write_bytes(content)
        files.append(file)
    return files


def write(folder: Path, rows: int, files: int) -> None:
    folder.mkdir()
    for number in range(files):
        first, last = number * rows // files, (number + 1) * rows // files
        with (folder / f"{number:05}.jsonl").open("w") as file:
            for start in range(first, last, ROWS_AT_ONCE):
                file.write(
                    "".join([LINE % row for row in range(start, min(start + ROWS_AT_ONCE, last))])
                )


def index(folder: Path) -> tuple[float, float]:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "distcore", "index", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return (
        time.perf_counter() - start,
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    )


def measured(folder: Path, kind: str, ranks: int) -> list[str]:
    """Print the line of an order from the start and from 99 %; return what breaks a bound."""
    start, late = (best_of(folder, kind, share, ranks) for share in (0.0, 0.99))
    for share, said in (("0 %", start), ("99 %", late)):
        print(
            f"{kind:8} {share:>5} {said['first']:9.0f} {said['step']:8.1f} {said['read']:9.1f}"
            f" {said['memory']:11.0f}"
        )
    bounds = {
        "step": max(start["step"], late["step"]) > 200,
        "memory": max(start["memory"], late["memory"]) > 200,
        "first": late["first"] > 1.2 * start["first"] + 5,
        "read": late["read"] > 1.2 * start["read"] + 1,
    }
    return [f"{kind}: {name}" for name, is_over in bounds.items() if is_over]


def best_of(folder: Path, kind: str, share: float, ranks: int, times: int = 3) -> dict[str, float]:
    """Return the least of each measure."""
    answers = [in_ranks(folder, kind, share, ranks) for _ in range(times)]
    return {name: min(answer[name] for answer in answers) for name in answers[0]}


def in_ranks(folder: Path, kind: str, share: float, ranks: int) -> dict[str, float]:
    """Return the largest first, step and read of all ranks, and the sum of their memory
    while all are alive.
    """
    programs = []
    for number in range(ranks):
        said = json.dumps(
            {"folder": str(folder), "kind": kind, "share": share, "number": number, "ranks": ranks}
        )
        command = [sys.executable, __file__, "--rank", said]
        programs.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    answers: list[dict[str, float]] = [json.loads(line) for line in each_says(programs)]
    memory = sum(
        float(line) for line in each_says(programs)
    )  # all are alive, so each counts its share of what is shared
    for program in programs:
        program.communicate()
    return {name: max(answer[name] for answer in answers) for name in answers[0]} | {
        "memory": memory
    }


def each_says(programs: list[subprocess.Popen[str]]) -> list[str]:
    """Let all go on, and return the next line of each."""
    for program in programs:
        assert program.stdin
        program.stdin.write("\n")
        program.stdin.flush()
    return [program.stdout.readline() for program in programs if program.stdout]


def rank(folder: str, kind: str, share: float, number: int, ranks: int) -> None:
    import numpy as np

    from distcore import BatchPlan, ConstantColumn
    from distcore_data import IndexedRows, WindowedRows, source_digest

    sys.stdin.readline()
    before, bytes_before, start = own_memory(), bytes_read(), time.process_time()
    rows = IndexedRows(Path(folder), {"columns.text": "text"})
    source_digest(Path(folder))
    whole = WindowedRows(bounds=np.array([0, len(rows)]), window=1)
    order = whole if kind == "full" else WindowedRows.even(0, len(rows), 64, window=1024)
    plan = BatchPlan(
        lengths=ConstantColumn(len(rows), 1),
        global_batch=BATCH,
        micro_batch=BATCH,
        seed=0,
        own=order,
    )
    first = int(plan.steps * share)
    read(rows, plan.rows(0, first)[number::ranks])
    cost, fetched, wall = (
        time.process_time() - start,
        bytes_read() - bytes_before,
        time.perf_counter(),
    )
    for step in range(first + 1, first + STEPS):
        read(rows, plan.rows(0, step)[number::ranks])
    step_ms = (time.perf_counter() - wall) / (STEPS - 1) * 1e3
    print(json.dumps({"first": cost * 1e3, "step": step_ms, "read": fetched / MIB}), flush=True)
    sys.stdin.readline()
    print((own_memory() - before) / MIB, flush=True)
    sys.stdin.readline()


def read(rows: Any, numbers: Any) -> None:
    texts = [text for (text,) in rows[numbers]]
    assert texts == [json.loads(LINE % number)["text"] for number in numbers.tolist()]


def own_memory() -> int:
    """Return the bytes of this process, and its share of those that it has with others."""
    [line] = [
        line
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    ]
    return int(line.split()[1]) * 1024


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
