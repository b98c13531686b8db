"""Measure orders of rows: how well they shuffle, what they read, and what a step costs.

    python benchmarks/streams.py [--rows 400000] [--batch 256] [--all]

Rows lie in shards of 64, and have a label by which they are sorted: the worst case. For each order
an epoch is cut into
batches. ``label``: standard deviation of the label's share per batch; of a full shuffle it is
0.5 / sqrt(batch), 0.031
for 256 rows. ``reads``: shards that are read in an epoch, for each shard, by one process that keeps
the shards of one window and two more; 1 is the least, and what a buffer needs, which keeps rows.
``step``: microseconds for the rows of one batch. A shuffle buffer, as of readers of a stream, holds
as many rows as the window.

Then the first batch of a run of 1e8 rows, at the start and at 99 %, of one source and of three
in a mixture whose
weights change: CPU milliseconds, and the MiB that the order keeps.

Bounds: windows read each shard at most 1.05 times, and with 1,024 shards ``label`` is at most 1.2
times that of a full shuffle; the first batch at 99 % takes at most 1.2 times as long as at the
start, and 1 ms for what a clock is off; an order keeps at most 200 MiB. Asked for other numbers,
the program prints them without a verdict.

Rows per second beside packages that stream shards: benchmarks/stream_peers.py; memory and resume of
1e8 rows that are
read: benchmarks/many_rows.py. With ``--all`` both come first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from distcore import BatchPlan, ConstantColumn
from distcore_data import MixedRows, WindowedRows, shares_of

SHARD = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--all", action="store_true", help="first many_rows.py and stream_peers.py")
    asked = parser.parse_args()
    for other in ("many_rows.py", "stream_peers.py") if asked.all else ():
        print(f"\n{other}", flush=True)
        subprocess.run([sys.executable, Path(__file__).with_name(other)], check=True)
    print(f"{'order':24} {'label':>7} {'reads':>7} {'step':>7}")
    spreads, most = dict[str, float](), 0.0
    for name, kept, batches in orders(asked.rows, asked.batch):
        start = time.perf_counter()
        rows = list(batches)
        micros = (time.perf_counter() - start) / len(rows) * 1e6
        read = reads(rows, kept, asked.rows) if kept else 1
        spreads[name], most = (
            label_spread(rows, asked.rows),
            max(most, read if name.startswith("windows") else 0),
        )
        print(f"{name:24} {spreads[name]:7.4f} {read:7.2f} {micros:7.0f}")
    late = list(resumes())
    if (asked.rows, asked.batch) == (400_000, 256):
        holds = (
            not late
            and most <= 1.05
            and spreads["windows of 1024"] <= 1.2 * spreads["full, 1026 kept"]
        )
        raise SystemExit(0 if holds else "a bound does not hold")


def orders(rows: int, batch: int) -> Iterator[tuple[str, int | None, Iterator[np.ndarray]]]:
    """Yield name, shards kept in memory, and batches of each order; ``None``: a buffer
    reads each shard once.
    """
    bounds = np.append(np.arange(0, rows, SHARD), rows)
    for window in (1, 64, 256, 1024, 4096):
        plan = plan_of(rows, batch, WindowedRows(bounds=bounds, window=window))
        yield f"windows of {window}", window + 2, each_batch(plan)
    for window in (256, 1024):
        yield f"buffer of {window} shards", None, buffered(bounds, window * SHARD, batch)
    yield "full, 1026 kept", 1026, each_batch(plan_of(rows, batch, None))


def resumes(rows: int = 10**8, times: int = 9) -> Iterator[str]:
    """Print what the first batch costs at the start and at 99 %; yield the orders
    that break a bound.
    """
    print(f"{'first batch of 1e8 rows':24} {'start':>7} {'99 %':>7} {'MiB':>7}")
    ends = [0, 6 * rows // 10, 9 * rows // 10, rows]
    first, second = shares_of([0.5, 0.3, 0.2]), shares_of([0.2, 0.5, 0.3])
    for kind in ("full", "windows"):
        one, *parts = (
            shuffled(kind, *pair, key) for key, pair in enumerate([(0, rows), *pairwise(ends)])
        )
        mixed = MixedRows(sources=tuple(parts), shares=first, later=((rows // 2, second),))
        for name, order in ((kind, one), (f"{kind}, mixed", mixed)):
            costs = [
                [first_batch(order, 2 * pair, 0), first_batch(order, 2 * pair + 1, 0.99)]
                for pair in range(times)
            ]
            start, late = np.median(costs, axis=0).tolist()
            tracemalloc.start()
            first_batch(order, 2 * times, 0.99)
            sources = order.sources if isinstance(order, MixedRows) else (order,)
            stored = sum(
                source.bounds.nbytes for source in sources if isinstance(source.bounds, np.ndarray)
            )
            kept = (tracemalloc.get_traced_memory()[0] + stored) / 2**20
            tracemalloc.stop()
            print(f"{name:24} {start:7.1f} {late:7.1f} {kept:7.1f}")
            if late > 1.2 * start + 1 or kept > 200:
                yield name


def shuffled(kind: str, start: int, stop: int, key: int) -> WindowedRows:
    if kind == "full":
        return WindowedRows(bounds=np.array([start, stop]), window=1, key=key)
    return WindowedRows.even(start, stop, SHARD, window=1024, key=key)


def first_batch(order: WindowedRows | MixedRows, seed: int, share: float) -> float:
    """Return the CPU milliseconds of a batch of 256 rows in an order that no batch
    was drawn from before.
    """
    plan = BatchPlan(
        lengths=ConstantColumn(10**8, 1),
        global_batch=256,
        micro_batch=256,
        seed=seed,
        own=replace(order),
    )
    start = time.process_time()
    plan.rows(0, int(plan.steps * share))
    return (time.process_time() - start) * 1e3


def plan_of(rows: int, batch: int, own: WindowedRows | None) -> BatchPlan:
    return BatchPlan(
        lengths=ConstantColumn(rows, 1), global_batch=batch, micro_batch=batch, seed=0, own=own
    )


def each_batch(plan: BatchPlan) -> Iterator[np.ndarray]:
    return (plan.rows(0, step) for step in range(plan.steps))


def buffered(bounds: np.ndarray, size: int, batch: int) -> Iterator[np.ndarray]:
    """Yield batches of shards in random order behind a shuffle buffer."""
    random = np.random.default_rng(0)
    shards = random.permutation(len(bounds) - 1)
    stream = np.concatenate([np.arange(bounds[shard], bounds[shard + 1]) for shard in shards])
    buffer, out = stream[:size].copy(), []
    for row, place in zip(
        stream[size:].tolist(), random.integers(0, size, len(stream) - size).tolist(), strict=True
    ):
        out.append(int(buffer[place]))
        buffer[place] = row
    rows = np.concatenate([np.asarray(out, np.int64), random.permutation(buffer)])
    return (rows[start : start + batch] for start in range(0, len(rows), batch))


def label_spread(batches: list[np.ndarray], rows: int) -> float:
    """Return the standard deviation of the share of the second half of all
    rows, over whole batches.
    """
    shares = [
        float((batch >= rows // 2).mean()) for batch in batches if len(batch) == len(batches[0])
    ]
    return float(np.std(shares))


def reads(batches: list[np.ndarray], kept: int, rows: int) -> float:
    """Return how often a shard is read in an epoch, by a process that keeps ``kept`` of
    them, the latest ones.
    """
    memory, count = OrderedDict[int, None](), 0
    for batch in batches:
        for shard in dict.fromkeys((batch // SHARD).tolist()):
            count += shard not in memory
            memory[shard] = None
            memory.move_to_end(shard)
            if len(memory) > kept:
                memory.popitem(last=False)
    return count / -(-rows // SHARD)


if __name__ == "__main__":
    main()
