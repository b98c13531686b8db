"""Datasets of more rows than memory: no whole column is read, and a run does what
it does with arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from distcore import Column, ConstantColumn, Datasets, RunConfig, train
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.distance import difference
from distcore.checkpoint.job_state import fingerprint
from distcore.errors import CheckpointError, TaskError
from distcore.jobs.dry_run import describe
from distcore.plugin.batching.columns import common_value, is_windowed, read
from distcore.plugin.batching.sampling import evaluation_plan
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem, RandomRows

MOST = 24
"""Most rows that a column here gives at once: a window of three global batches."""


class Windowed:
    """A column that gives no more than a window at once."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        assert isinstance(rows, np.ndarray), "read as a sequence"
        assert len(rows) <= MOST, "read as a whole"
        values: np.ndarray = self._values[rows]
        return values


class WindowedRows:
    """The rows of the kit's problem, their columns read a window at a time."""

    def __init__(self, rows: RandomRows) -> None:
        self._rows = rows
        self.lengths: Column = Windowed(rows.lengths)
        self.items: Column = Windowed(rows.items)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self._rows.batch(indices)


class Identified(WindowedRows):
    content = "the kit's rows"


@dataclass(frozen=True, kw_only=True)
class Large(Problem):
    """The kit's problem with columns that are no arrays."""

    def prepare(self, config: RunConfig) -> Datasets:
        data = super().prepare(config)
        assert isinstance(data.train, RandomRows)
        assert isinstance(data.evaluation, RandomRows)
        held_out = WindowedRows(data.evaluation)
        return Datasets(train=Identified(data.train), evaluation=held_out, test=held_out)


def config(out: Path, **changes: Any) -> RunConfig:
    given = {
        "out": str(out),
        "max_steps": 15,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "lr": 0.01,
    }
    quiet = {"device": "cpu", "log_every": 1, "extensions": {"progress": False}}
    return RunConfig.model_validate(given | quiet | {"loader": {"window": 3}} | changes)


def last(out: Path) -> Checkpoint:
    return Checkpoint(max((out / "checkpoints").iterdir()))


def largest_difference(one: Path, other: Path) -> float:
    first, second = last(one), last(other)
    return max(difference(first[name], second[name]).largest for name in first)


@pytest.mark.programs
@pytest.mark.parametrize("grouping", ["batch", "window"])
@pytest.mark.parametrize("stored", [10, 1000])
def test_a_run_reads_no_whole_column_and_is_the_one_with_arrays(
    stored: int, grouping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", stored)
    loader = {"length_grouping": grouping, "window": 3}
    reports = [
        train(config(tmp_path / type(task).__name__, loader=loader), task)
        for task in (Large(rows=53, weighted=True), Problem(rows=53, weighted=True))
    ]
    assert largest_difference(tmp_path / "Large", tmp_path / "Problem") == 0
    assert reports[0]["evaluation"]["loss"] == pytest.approx(
        reports[1]["evaluation"]["loss"], rel=1e-6
    )
    assert last(tmp_path / "Large").job_state()["order"] == (
        "feistel" if stored == 10 else "permutation"
    )


@pytest.mark.programs
@pytest.mark.parametrize("grouping", ["batch", "window"])
def test_a_run_with_a_computed_order_resumes_exactly(
    grouping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", 10)
    given: dict[str, Any] = {
        "loader": {"length_grouping": grouping, "window": 3},
        "schedule": {"name": "constant"},
    }
    train(config(tmp_path / "whole", **given), Large(rows=53))
    train(config(tmp_path / "cut", **given, max_steps=9), Large(rows=53))
    train(
        config(tmp_path / "cut", **given, resume="auto", resume_changed="total_steps"),
        Large(rows=53),
    )
    assert largest_difference(tmp_path / "cut", tmp_path / "whole") == 0


@pytest.mark.programs
def test_a_checkpoint_of_the_other_order_is_refused_and_one_without_an_entry_is_a_permutation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(tmp_path, max_steps=3), Problem(rows=53))
    with monkeypatch.context() as patch:
        patch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", 10)
        line = (
            "the order of its rows was 'permutation' and is 'feistel': the resumed run would see"
            " other rows; resume "
        )
        with pytest.raises(CheckpointError, match=line):
            train(config(tmp_path, max_steps=3, resume="auto"), Problem(rows=53))
    real = Checkpoint.job_state
    monkeypatch.setattr(
        Checkpoint, "job_state", lambda self: {k: v for k, v in real(self).items() if k != "order"}
    )
    train(config(tmp_path, max_steps=3, resume="auto"), Problem(rows=53))


def test_columns_that_are_no_arrays_need_a_digest_of_the_content(tmp_path: Path) -> None:
    class Anonymous(Large):
        def prepare(self, config: RunConfig) -> Datasets:
            data = super().prepare(config)
            return Datasets(train=data.evaluation, evaluation=data.evaluation, test=data.evaluation)

    line = (
        r"^task: prepare\(\) returned training data whose .+ no numpy arrays: give the dataset an"
        r" attribute 'content'"
    )
    with pytest.raises(TaskError, match=line):
        train(config(tmp_path), Anonymous())
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_fingerprint_of_many_rows_is_their_number_and_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(Identified):
        content = "other rows"

    few = fingerprint(RandomRows(53))
    assert (
        fingerprint(Identified(RandomRows(53)))
        == fingerprint(Identified(RandomRows(53)))
        != fingerprint(Other(RandomRows(53)))
    )
    assert fingerprint(Identified(RandomRows(53))) != fingerprint(Identified(RandomRows(52)))
    monkeypatch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", 10)
    # an array of many rows is not read, where a digest stands for it
    assert fingerprint(RandomRows(53)) != few


def test_the_fingerprint_of_few_rows_is_what_it_always_was() -> None:
    assert fingerprint(RandomRows(53, weighted=True)).startswith("006a242b46a948ed")


def test_a_memory_mapped_column_of_many_rows_is_evaluated_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = RandomRows(20)
    np.save(tmp_path / "lengths.npy", rows.lengths)
    rows.lengths = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    run: Any = type("", (), {"config": config(tmp_path), "world": type("", (), {"shards": 2})})
    assert (
        rows.lengths[evaluation_plan(run, rows).rows(0, 0)].tolist()
        == sorted(rows.lengths)[::-1][:4]
    )
    monkeypatch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", 10)
    assert evaluation_plan(run, rows).rows(0, 1).tolist() == [4, 5, 6, 7]


def test_a_dry_run_reads_no_whole_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", 10)
    task = Large(rows=53)
    resolved = resolve(config(tmp_path), 1, task=task)
    assert "first step has 4 micro-batch(es), of 2, 2, 2, 2 rows" in describe(
        resolved, task.prepare(resolved.config)
    )


@pytest.mark.programs
def test_a_constant_column_is_an_array_of_ones_without_the_memory(tmp_path: Path) -> None:
    class Ones(Problem):
        def prepare(self, config: RunConfig) -> Datasets:
            data = super().prepare(config)
            data.train.items = ConstantColumn(53, 1)  # type: ignore[misc]
            return data

    train(config(tmp_path / "constant"), Ones(rows=53))
    train(config(tmp_path / "array"), Problem(rows=53))
    assert largest_difference(tmp_path / "constant", tmp_path / "array") == 0
    states = [last(tmp_path / name).job_state()["data"] for name in ("constant", "array")]
    assert states[0] == states[1]


def test_the_common_value_of_the_rows_of_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    assert common_value(np.array([3, 3, 3])) == common_value(ConstantColumn(10**9, 3)) == 3
    assert common_value(np.array([3, 3, 4])) is common_value(np.array([], np.int64)) is None
    assert common_value(Windowed(np.ones(99, np.int64))) is None
    assert not is_windowed(np.ones(53))
    monkeypatch.setattr("distcore.plugin.batching.permutation.STORED_ROWS", 10)
    assert is_windowed(np.ones(53))
    assert common_value(np.ones(53, np.int64)) is None


def test_a_column_that_returns_other_than_it_was_asked_for_is_refused() -> None:
    class Short(Windowed):
        def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
            return super().__getitem__(rows)[1:]

    line = (
        r"^dataset: its column Short returned values of shape \(2,\) for rows of shape \(3,\);"
        r" return one integer"
    )
    with pytest.raises(TaskError, match=line):
        read(Short(np.arange(9)), np.array([1, 2, 3]))
