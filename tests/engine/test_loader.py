"""Loader processes: what they send is what they collated, small tensors by value and others in shared memory."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distcore import RunConfig
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


def batches(workers: int) -> list[Any]:
    config = RunConfig.model_validate({"device": "cpu", "loader": {"workers": workers}})
    micros = MicroBatches(OfAllKinds(), lambda epoch, step: [MicroBatch(np.array([step]))], config)  # type: ignore[arg-type]
    return [batch for _, batch in micros.stream(0, range(3))]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_process_sends_what_it_collated(workers: int) -> None:
    sent = batches(workers)
    assert difference(sent, batches(0)) is None
    sent[0]["numbers"] += 1
    assert sent[0]["learned"].requires_grad
    shared = {name: value.is_shared() for name, value in sent[0].items() if isinstance(value, Tensor)}
    assert [name for name, is_shared in shared.items() if is_shared] == ["half", "large", "learned"]


def test_only_a_loader_process_sends_by_value() -> None:
    before = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    batches(1)
    assert ForkingPickler._extra_reducers == before  # type: ignore[attr-defined]
