"""A compiled model trains as one that is not, under every strategy that takes it, and its
checkpoints are the same.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import strategy_chain
import torch
from work_folder import enter, write_rows

from distcore import Report, RunConfig, launch, train
from distcore.checkpoint import read_tensors

# each run compiles anew
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
WAYS: dict[str, dict[str, Any]] = {
    "ddp on": {},
    "ddp regions": {},
    "fsdp regions": {},
    "deepspeed on 0": {"stage": 0},
    "deepspeed regions 2": {"stage": 2},
    "horovod on": {},
    "horovod regions": {},
    "accelerate on": {},
    "accelerate regions 1": {"backend": "deepspeed", "zero_stage": 1},
}


def config(folder: Path, **changes: Any) -> RunConfig:
    """Without dropout: compiled code has masks of its own, in which torch
    draws other random numbers.
    """
    rows, dropout = str(folder / "rows.json"), changes.pop("dropout", 0.0)
    keys: dict[str, Any] = {
        "task_options": {"model": "bert-tiny", "data": rows, "max_seq_len": 8, "dropout": dropout},
        "lr": 1e-4,
        "max_steps": STEPS,
        "global_batch_size": 8,
        "device": "cpu",
        "log_every": 1,
        "log_level": "error",
        "save_every": 2,
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    return RunConfig(**keys | changes)


def solve(changes: RunConfig, backend: str) -> Report:
    """Train with another backend of torch.compile: a C++ compiler takes minutes, and is the
    same for all strategies.
    """
    with torch.compiler.set_stance("default", force_backend=backend):
        return train(changes)


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    enter(tmp_path, monkeypatch)
    write_rows(tmp_path)
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_checkpoints_are_those_without_compiling_and_a_resumed_run_has_them_too(
    way: str, folder: Path
) -> None:
    name, mode, *_ = way.split()
    if not strategy_chain.is_offered(name):
        pytest.skip(f"{name} is not installed")
    keys = {"strategy": name, "strategy_options": WAYS[way], "nproc": 2}
    for compiled in ("off", mode):
        out = {"out": str(folder / compiled), "compile": compiled}
        report = launch(partial(solve, config(folder, **keys, **out), "aot_eager"), nproc=2)[0]
        assert report["compile"]["mode"] == compiled
    assert report["compile"]["compilations"] > 0
    assert losses(folder / mode) == pytest.approx(losses(folder / "off"), rel=1e-5)
    ours, theirs = (
        read_tensors(folder / run / f"checkpoints/step-{STEPS:08d}") for run in (mode, "off")
    )
    assert ours.keys() == theirs.keys()
    half = {
        "resume": str(folder / mode / "checkpoints/step-00000002"),
        "out": str(folder / "resumed"),
        "compile": mode,
    }
    launch(partial(solve, config(folder, **keys, **half), "aot_eager"), nproc=2)
    assert losses(folder / "resumed") == losses(folder / mode)[2:]


def test_a_resumed_run_has_the_dropout_of_one_that_was_not_interrupted(folder: Path) -> None:
    keys: dict[str, Any] = {"strategy": "ddp", "nproc": 2, "compile": "regions", "dropout": 0.1}
    launch(partial(solve, config(folder, out=str(folder / "whole"), **keys), "aot_eager"), nproc=2)
    half: dict[str, Any] = {
        "resume": str(folder / "whole/checkpoints/step-00000002"),
        "out": str(folder / "resumed"),
    }
    launch(partial(solve, config(folder, **keys, **half), "aot_eager"), nproc=2)
    assert losses(folder / "resumed") == losses(folder / "whole")[2:]


def test_a_run_that_is_compiled_in_earnest_has_the_losses_of_one_that_is_not(folder: Path) -> None:
    for mode in ("off", "regions"):
        report = train(config(folder, out=str(folder / mode), compile=mode))
    assert 0 < report["compile"]["compilations"] <= 4
    assert losses(folder / "regions") == pytest.approx(losses(folder / "off"), rel=1e-5)
