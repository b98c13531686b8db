"""Attention of torch that a run may take, by the lengths of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluated import evaluate_checkpoint

from distcore import RunConfig, train
from distcore.distributed.arithmetic import attention_of
from distcore.engine import trainer
from distcore.jobs import evaluate
from distcore.plugin.batching.columns import Column
from distcore.testing.problem import Problem

CUDNN = torch.backends.cuda.cudnn_sdp_enabled


@pytest.mark.parametrize(
    ("device", "lengths", "may"),
    [
        ("cuda", [8] * 199 + [7], True),  # the last block of a stream of documents is shorter
        ("cuda", [8] * 98 + [7] * 2, False),
        ("cuda", [], False),
        ("cpu", [8, 7], True),
    ],
)
def test_cudnn_plans_for_no_shape_that_comes_once(
    device: str, lengths: list[int], may: bool
) -> None:
    before = CUDNN()
    with attention_of(torch.device(device), np.array(lengths)):
        assert CUDNN() == (before and may)
    assert CUDNN() == before


def test_training_and_evaluation_choose_it_by_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextmanager
    def attention(device: torch.device, lengths: Column) -> Iterator[None]:
        asked.append(len(lengths))
        yield

    for module in (trainer, evaluate):
        monkeypatch.setattr(module, "attention_of", attention)
    task = Problem(rows=50, evaluation_rows=11)
    config = RunConfig(
        out=str(tmp_path / "run"), global_batch_size=8, max_steps=2, lr=0.01, device="cpu",
        extensions={"progress": False},
    )  # fmt: skip
    train(config, task)
    (path,) = (tmp_path / "run/checkpoints").glob("step-*")
    evaluate_checkpoint(config, path, task)
    assert asked == [50, 11]
