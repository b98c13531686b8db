"""Under ZeRO-3 a rank holds a part of a frozen model, as of the trained one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distcore import RunConfig, launch
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject
from distcore.testing.variants import Referenced

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def held(folder: Path) -> list[tuple[int, int]]:
    """Elements here and in whole, of the frozen and of the trained model, in a rank."""
    asked: list[nn.Module] = []

    class Notes(Referenced):
        def consult(self, frozen: Mapping[str, Any], batch: Any) -> Any:
            asked[:] = frozen.values()
            return super().consult(frozen, batch)

    config = RunConfig(strategy="deepspeed", strategy_options={"stage": 3}, nproc=2, device="cpu")
    with lab_of(Subject(config=config, cases=()), folder) as lab:
        job = lab.job(Notes())
        job.train(1)
        parts: Any = [[*model.parameters()] for model in (*asked, job.run.module)]
        return [
            (sum(p.ds_tensor.numel() for p in part), sum(p.ds_numel for p in part))
            for part in parts
        ]


def test_a_rank_holds_a_part_of_a_frozen_model(tmp_path: Path) -> None:
    for frozen, trained in launch(held, tmp_path, nproc=2):
        assert frozen == trained
        assert frozen[0] < 0.51 * frozen[1] + 100  # small tensors are padded
