"""The law of streams with real loader processes: they read real shards, and no row
is lost or doubled.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distcore import BatchPlan, ConstantColumn, RunConfig
from distcore.engine.loader import Failed, Loaded, MicroBatches
from distcore.plugin.batching.sampling import rank_sampler
from distcore_data import IndexedRows, MixedRows, RowOrder, WindowedRows, shares_of

PARTS = 3
"""Most parts of a run; each begins where the one before stopped, with other ranks and workers."""


@dataclass(frozen=True, eq=False)
class ReadRows:
    """The numbers that rows of files hold, and the process that read them."""

    rows: IndexedRows

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        numbers = torch.tensor([number for (number,) in self.rows[indices]], dtype=torch.int64)
        return {"numbers": numbers, "process": torch.tensor(os.getpid())}


@dataclass(frozen=True)
class Schedule:
    """A run in parts of so many steps, data shards, and loader processes for each."""

    plan: BatchPlan
    parts: tuple[tuple[int, int, int], ...]

    def steps(self, rows: ReadRows) -> Iterator[tuple[int, int, list[int]]]:
        """Yield epoch, step and the numbers that all ranks read."""
        done = 0
        for count, shards, workers in self.parts:
            config = RunConfig(loader={"workers": workers}, device="cpu")
            for epoch, steps in spans(done, count, self.plan.steps):
                read = [
                    self.read(
                        MicroBatches(rows, rank_sampler(self.plan, shard, shards), config),  # type: ignore[arg-type]
                        epoch,
                        steps,
                    )
                    for shard in range(shards)
                ]
                for step in steps:
                    yield epoch, step, list(chain.from_iterable(one.get(step, []) for one in read))
            done += count

    def read(self, batches: MicroBatches, epoch: int, steps: range) -> dict[int, list[int]]:
        """The numbers of each step that a rank reads."""
        read, step = dict[int, list[int]](), steps.start
        for micro, batch in batches.stream(epoch, steps):
            assert (int(batch["process"]) == os.getpid()) == (not batches.workers)
            read.setdefault(step, []).extend([] if micro.is_padding else batch["numbers"].tolist())
            step += micro.last
        return read


def spans(first: int, count: int, epoch_steps: int) -> Iterator[tuple[int, range]]:
    """Cut steps where epochs end."""
    while count:
        epoch, inside = divmod(first, epoch_steps)
        some = min(count, epoch_steps - inside)
        yield epoch, range(inside, inside + some)
        first, count = first + some, count - some


def random_source(random: np.random.Generator, folder: Path) -> tuple[ReadRows, RowOrder, int]:
    """1 to 8 files of rows, one of which may be a source of its own."""
    folder.mkdir()
    ends = np.cumsum(random.integers(1, 20, int(random.integers(1, 9)))).tolist()
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        lines = "".join(json.dumps({"number": row}) + "\n" for row in range(start, end))
        (folder / f"{number}.jsonl").write_text(lines)
    rows = ReadRows(IndexedRows(folder, {"number": "number"}))
    bounds, window = np.array([0, *ends]), int(random.integers(1, 4))
    if len(ends) < 3:
        return rows, WindowedRows(bounds=bounds, window=window), ends[-1]
    sources = (
        WindowedRows(bounds=bounds[:3], window=window),
        WindowedRows(bounds=bounds[2:], window=window, key=1),
    )
    shares = shares_of(random.uniform(0.1, 1, 2).tolist())
    return rows, MixedRows(sources=sources, shares=shares), ends[-1]


def check_schedules(folder: Path, schedules: int, most_shards: int = 4) -> int:
    """Each step of random schedules has the planned rows. Return the number of loader processes."""
    random, processes = np.random.default_rng(0), 0
    for number in range(schedules):
        rows, order, count = random_source(random, folder / str(number))
        batch, micro = int(random.integers(1, 13)), int(random.integers(1, 5))
        plan = BatchPlan(
            lengths=ConstantColumn(count, 1),
            global_batch=batch,
            micro_batch=micro,
            seed=number,
            own=order,
        )
        draws = random.integers(
            1, [6, most_shards + 1, 5], (int(random.integers(1, PARTS + 1)), 3)
        ).tolist()
        parts = tuple((steps, shards, workers - (number % 2)) for steps, shards, workers in draws)
        processes += sum(shards * workers for _, shards, workers in parts)
        for epoch, step, numbers in Schedule(plan, parts).steps(rows):
            column = order(number, epoch)
            planned = column[np.arange(step * batch, min((step + 1) * batch, count))]
            assert Counter(numbers) == Counter(planned.tolist())
    return processes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))


@pytest.mark.programs
def test_loader_processes_lose_and_double_no_row(tmp_path: Path) -> None:
    assert check_schedules(tmp_path, 4, most_shards=2) >= 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loader_processes_of_many_schedules_lose_and_double_no_row(tmp_path: Path) -> None:
    assert check_schedules(tmp_path, 60) > 500


class EachAll(IterableDataset[Loaded | Failed]):
    """Micro-batches that each process reads, as of a stream that does not know that it
    is one of several.
    """

    def __init__(self, batches: MicroBatches, epoch: int, steps: range) -> None:
        self.batches, self.micros = (
            batches,
            [micro for step in steps for micro in batches.sampler(epoch, step)],
        )

    def __iter__(self) -> Iterator[Loaded | Failed]:
        return (self.batches[micro] for micro in self.micros)


class EqualShares(EachAll):
    """Micro-batches of which each process reads as many as the others, without
    those that are left.
    """

    def __iter__(self) -> Iterator[Loaded | Failed]:
        told = get_worker_info()
        assert told is not None
        share = len(self.micros) // self.batches.workers
        return islice(super().__iter__(), told.id * share, (told.id + 1) * share)


def of_iterable(
    kind: Callable[[MicroBatches, int, range], EachAll],
) -> Callable[..., Iterator[Any]]:
    """The stream of a loader whose processes iterate, rather than being told what to read."""

    def stream(batches: MicroBatches, epoch: int, steps: range) -> Iterator[Any]:
        if not batches.workers:
            return STREAM(batches, epoch, steps)
        loader = DataLoader(
            kind(batches, epoch, steps), batch_size=None, num_workers=batches.workers
        )
        return ((loaded.micro, loaded.batch) for loaded in loader)

    return stream


def stale(batches: MicroBatches, epoch: int, steps: range) -> Iterator[Any]:
    """Processes that were started for the first epoch, and go on with its rows."""
    return STREAM(batches, 0, steps)


STREAM = MicroBatches.stream


@pytest.mark.programs
@pytest.mark.parametrize("broken", [of_iterable(EachAll), of_iterable(EqualShares), stale])
def test_the_law_sees_broken_loader_processes(
    broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatches, "stream", broken)
    with pytest.raises(AssertionError):
        check_schedules(tmp_path, 8, most_shards=2)
