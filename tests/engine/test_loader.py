"""Loader processes: what they send is what they collated, small tensors by value and
others in shared memory.
"""

from __future__ import annotations

import re
from collections import namedtuple
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distcore import RunConfig, Simple, TaskError
from distcore.engine.collation import difference
from distcore.engine.loader import BY_VALUE, MicroBatches
from distcore.plugin.strategy.contract import MicroBatch


class OfAllKinds:
    """Rows whose batch has a tensor of each kind."""

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        return {
            "numbers": torch.arange(int(rows[0]), 9),
            "some of them": torch.arange(12.0).reshape(3, 4)[:, ::2],
            "none": torch.empty(0, 3, dtype=torch.bool),
            "one": torch.tensor(2.5, dtype=torch.float64),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "large": torch.arange(BY_VALUE),
            "learned": torch.ones(3, requires_grad=True),
            "other rows": [(rows, "text")],
        }


def batches(workers: int, rows: Any = None) -> list[Any]:
    config = RunConfig.model_validate({"device": "cpu", "loader": {"workers": workers}})
    micros = MicroBatches(
        rows or OfAllKinds(),  # type: ignore[arg-type]
        lambda epoch, step: [MicroBatch(np.array([step]))],
        config,
    )
    return [batch for _, batch in micros.stream(0, range(3))]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_process_sends_what_it_collated(workers: int) -> None:
    sent = batches(workers)
    assert difference(sent, batches(0)) is None
    sent[0]["numbers"] += 1
    assert sent[0]["learned"].requires_grad
    shared = {
        name: value.is_shared() for name, value in sent[0].items() if isinstance(value, Tensor)
    }
    assert [name for name, is_shared in shared.items() if is_shared] == ["half", "large", "learned"]


def test_the_process_of_the_run_does_not_send_by_value() -> None:
    before = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    batches(1)
    assert ForkingPickler._extra_reducers == before  # type: ignore[attr-defined]


class Unsendable:
    """Rows whose batch no other process can read: its class is inside of this one."""

    Pair = namedtuple("Pair", "x y")
    Pair.__qualname__ = "NowhereToBeFound"

    def batch(self, rows: np.ndarray) -> Any:
        return self.Pair(torch.ones(2), torch.zeros(BY_VALUE))


class Stops:
    """Rows that end too early."""

    def batch(self, rows: np.ndarray) -> Any:
        raise StopIteration


def test_a_batch_that_no_process_can_send_is_refused_and_not_waited_for() -> None:
    assert len(batches(0, Unsendable())) == 3
    line = (
        r"^dataset: a loader process cannot send its batch \(PicklingError: .*\): define its"
        r" classes at the top of"
    )
    with pytest.raises(TaskError, match=line):
        batches(1, Unsendable())


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_end_too_early_are_an_error_and_no_end(workers: int) -> None:
    with pytest.raises(
        TaskError,
        match=r"batch\(\) raised StopIteration for rows \[0\] …; raised at .*test_loader.py:",
    ):
        batches(workers, Stops())


class Faulty:
    """Rows whose code has a mistake."""

    def batch(self, rows: np.ndarray) -> Any:
        columns: dict[str, Tensor] = {}
        return columns["no such\ncolumn"]


def test_a_mistake_in_a_loader_process_is_one_line_and_its_traceback_a_note() -> None:
    with pytest.raises(RuntimeError) as told:
        batches(1, Faulty())
    assert re.fullmatch(
        r"in a loader process: KeyError: .*; raised at \S*test_loader.py:\d+", str(told.value)
    )
    assert "in batch\n" in told.value.__notes__[0]


class Nothing(Simple):
    """Rows, some of which are missing."""


@pytest.mark.parametrize(
    "rows", [[torch.ones(2), None], [(torch.ones(2), None), (torch.ones(2), None)]]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_nothing_are_named(workers: int, rows: list[Any]) -> None:
    class Rows:
        def batch(self, numbers: np.ndarray) -> Any:
            return Nothing().collate(rows)

    with pytest.raises(
        TaskError,
        match=r"rows of .* make no batch \(a row is None, or has it among its values\); write",
    ):
        batches(workers, Rows())
