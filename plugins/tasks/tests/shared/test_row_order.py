"""Training rows in windows of shards, in every task: the same at any number of
ranks, and on resume.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import encoded, pixels

from distcore import RunConfig, launch, train
from distcore.errors import CheckpointError, ConfigError
from distcore.plugin.batching.sampling import training_plan
from distcore_data import WindowedRows
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.embedding.task import Embedding
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.reward_model.task import RewardModel
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared import row_order
from distcore_tasks.shared.options import Order
from distcore_tasks.text_classification.task import TextClassification
from distcore_tasks.token_classification.task import TokenClassification

ROWS = 40
TASKS: dict[type[Any], Callable[[int], dict[str, Any]]] = {
    CausalLM: lambda n: {"prompt": f"after {n}?", "completion": f" {n + 1}"},
    Embedding: lambda n: {"anchor": f"after {n}?", "positive": f"{n + 1}"},
    MaskedLM: lambda n: {"text": f"after {n} comes {n + 1}" + " and on" * (n % 5)},
    Seq2Seq: lambda n: {"source": f"read {n}", "target": f"wrote {n % 7}"},
    RewardModel: lambda n: {"prompt": f"after {n}?", "chosen": f" {n + 1}", "rejected": " none"},
    TextClassification: lambda n: {"text": f"text {n}", "label": "ab"[n % 2]},
    TokenClassification: lambda n: {"tokens": ["at", str(n)], "tags": ["O", "B-N"]},
}
SHARD = 4


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_order, "SHARD", SHARD)


def write_rows(path: Path, row: Callable[[int], dict[str, Any]], rows: int = ROWS) -> str:
    path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(rows)))
    return str(path)


def check_windows(full: Any, rows: Any) -> None:
    """Epochs have each row once, two shards at a time; the digest tells the order."""
    assert full.row_order is None
    assert isinstance(rows.row_order, WindowedRows)
    assert full.content != rows.content
    plan = training_plan(RunConfig(global_batch_size=8, micro_batch_size=8), rows)
    batches = [plan.rows(1, step) for step in range(plan.steps)]
    assert sorted(np.concatenate(batches)) == list(range(len(rows)))
    assert len(np.unique(batches[0] // SHARD)) <= 3


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_every_task_takes_windows(task: type[Any], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", TASKS[task])
    full, windows = (
        task(data=source, **options).prepare(RunConfig()).train for options in ({}, WINDOWS)
    )
    check_windows(full, windows)


WINDOWS: dict[str, Any] = {"order": Order(kind="windows", window_shards=2)}


def test_images_that_vary_by_epoch_take_windows(tmp_path: Path) -> None:
    for number in range(ROWS):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(encoded(pixels(number)))
    source = str(tmp_path / "images")
    both = [
        ImageClassification(data=source, image_size=12, **more).prepare(RunConfig())
        for more in ({}, WINDOWS)
    ]
    check_windows(both[0].train, both[1].train)


def test_packed_rows_have_the_order_of_padded_ones(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", TASKS[CausalLM])
    rows: Any = CausalLM(data=source, **WINDOWS).prepare(RunConfig(padding_free="on")).train
    assert rows.row_order is rows.padded().row_order is not None


def test_a_size_of_windows_without_windows_is_one_line() -> None:
    line = (
        "order.window_shards = 2: order.kind = 'full' has no windows; leave it out, or set"
        " order.kind=windows"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        Order(window_shards=2)


ASKED: dict[str, Any] = {"order": {"kind": "windows", "window_shards": 2}}


def config(folder: Path, out: str, **changes: Any) -> RunConfig:
    tree = {
        "task": "masked-lm",
        "out": str(folder / out),
        "max_steps": 6,
        "global_batch_size": 8,
        "lr": 0.001,
        "micro_batch_size": 2,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    options = {"data": str(folder / "rows.jsonl"), "max_seq_len": 24, "dropout": 0.0, **ASKED}
    return RunConfig.model_validate(
        tree | changes | {"task_options": options | changes.get("task_options", {})}
    )


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    write_rows(folder / "rows.jsonl", TASKS[MaskedLM], rows=400)
    return folder


GOING_ON: dict[str, Any] = {"resume": "auto", "resume_changed": ["total_steps"]}


@pytest.mark.ranks
@pytest.mark.programs
@pytest.mark.timeout(300)
def test_two_ranks_go_on_inside_an_epoch_as_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of 45 steps in parts, the second of two ranks with a loader's worker."""
    monkeypatch.setattr(row_order, "SHARD", 64)  # ranks are new processes, which nobody patches
    whole = config(folder, "whole", max_steps=50)
    train(whole)
    train(config(folder, "parts", max_steps=40))
    more = GOING_ON | {"nproc": 2, "strategy": "ddp", "loader": {"workers": 1}, "max_steps": 50}
    launch(train, config(folder, "parts", **more), nproc=2)
    assert losses(folder / "parts") == pytest.approx(losses(folder / "whole"), rel=1e-4)
    assert len(losses(folder / "whole")) == 50


@pytest.mark.programs
def test_a_changed_row_order_is_refused_on_resume_unless_confirmed(folder: Path) -> None:
    train(config(folder, "asked", max_steps=2))
    other = {"order": {"kind": "windows", "window_shards": 3}}
    with pytest.raises(
        CheckpointError,
        match=r"task_options.order was .* and is .*: .*; accept that with --resume-changed",
    ):
        train(config(folder, "asked", max_steps=3, task_options=other, **GOING_ON))
    confirmed = GOING_ON | {"resume_changed": ["total_steps", "order"]}
    train(config(folder, "asked", max_steps=3, task_options=other, **confirmed))
    assert len(losses(folder / "asked")) == 3
