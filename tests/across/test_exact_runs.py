"""Runs under ``exact``: tasks have the bits of one process on three ranks, which can share neither
rows nor blocks equally: in weights, moments, log lines, evaluations and the best checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distcore import RunConfig, launch, load_config, train
from distcore_workbench.compare.distance import other_bits

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.needs("distcore-ddp")]

TEXTS = {"task": "text-classification", "model": "bert-tiny", "max_seq_len": 16}
RUNS: dict[str, dict[str, Any]] = {
    "text-classification": TEXTS,
    "seq2seq": {"task": "seq2seq"},
    "embedding": {"task": "embedding", "max_seq_len": 16},
    "preference": {"task": "preference", "max_seq_len": 96},
    "reward-model": {"task": "reward-model", "max_seq_len": 96},
    "distillation": {"task": "distillation"},
    "image-classification": {"task": "image-classification"},
    "gradient checkpointing": TEXTS | {"gradient_checkpointing": True},
}
COMMON: dict[str, Any] = {
    "exact": 4,
    "device": "cpu",
    "global_batch_size": 32,
    "max_steps": 3,
    "eval_every": 2,
    "save_every": 1,
    "log_every": 1,
    "checkpoints": {"keep_last": 5},
    "log_level": "error",
    "extensions": {"progress": False},
}
LOGGED = ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy")
"""Values of log lines that have the same bits."""


def config(out: Path, run: dict[str, Any], **changes: Any) -> RunConfig:
    return load_config(None, COMMON | run | {"out": str(out)} | changes)


def train_all(configs: list[RunConfig]) -> None:
    for each in configs:
        train(each)


def logged(out: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("step", *LOGGED) if key in line} for line in lines]


def newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def compare(out: Path, expected: Path) -> None:
    bits = other_bits(newest(out), newest(expected))
    assert bits.differing == 0, bits
    assert logged(out) == logged(expected)
    reports = [json.loads((each / "report.json").read_text()) for each in (out, expected)]
    assert reports[0]["evaluation"] == reports[1]["evaluation"]
    assert reports[0]["best"] == reports[1]["best"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every run alone, and all again in one launch of three ranks."""
    folder = tmp_path_factory.mktemp("runs")
    alone = [config(folder / "one" / name, run) for name, run in RUNS.items()]
    launch(train_all, alone, nproc=1)
    ranks: dict[str, Any] = {"strategy": "ddp", "nproc": 3}
    together = [config(folder / "three" / name, run, **ranks) for name, run in RUNS.items()]
    launch(train_all, together, nproc=3)
    return folder


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", RUNS)
def test_three_ranks_have_the_bits_of_one(name: str, folder: Path) -> None:
    compare(folder / "three" / name, folder / "one" / name)
