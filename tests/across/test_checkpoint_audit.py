"""Loading a checkpoint runs no pickle opcode, imports no name and executes nothing; and the
watch would see it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_job import Slow
from watch import watched

from distcore import RunConfig, checkpoint, launch, registry
from distcore.checkpoint import Checkpoint
from distcore.engine.build import build_run
from distcore.engine.trainer import set_up
from distcore.plugin.strategy.contract import RankInfo
from distcore.rank_environment import join
from distcore.resolve.resolve import resolve

NOTHING_TO_NAME = pickle.dumps({"weights": [1, 2, 3]})
NAMES = pickle.dumps(OrderedDict(a=1))
WAYS: dict[str, Any] = {
    "single": {},
    "ddp": {},
    "fsdp": {},
    "deepspeed": {"stage": 2},
    "horovod": {},
    "accelerate": {},
}


@pytest.fixture
def saved(undisturbed: Path) -> Path:
    """The last checkpoint of a small run."""
    return undisturbed / "checkpoints/step-00000015"


def torch_file() -> io.BytesIO:
    torch.save({"weight": torch.ones(2)}, file := io.BytesIO())
    file.seek(0)
    return file


PLANTED: dict[str, Any] = {
    "a pickle that names nothing": lambda: pickle.loads(NOTHING_TO_NAME),
    "a pickle that names a class": lambda: pickle.loads(NAMES),
    "a pickle from a file": lambda: pickle.load(io.BytesIO(NOTHING_TO_NAME)),
    "an unpickler": lambda: pickle.Unpickler(io.BytesIO(NOTHING_TO_NAME)).load(),
    "an unpickler in Python": lambda: pickle._Unpickler(io.BytesIO(NOTHING_TO_NAME)).load(),
    "torch.load": lambda: torch.load(torch_file(), weights_only=False),
    "torch.load of weights only": lambda: torch.load(torch_file(), weights_only=True),
    "an import": lambda: __import__("this_is_no_module"),
    "code": lambda: eval("1 + 1"),
    "a command": lambda: os.system("true"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_watch_sees(name: str) -> None:
    with watched() as seen:
        try:
            PLANTED[name]()
        except ModuleNotFoundError:
            assert name == "an import"
    assert seen


def test_the_watch_sees_a_pickle_in_place_of_the_job_state(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "job_state", lambda self: pickle.loads(NOTHING_TO_NAME))
    with watched() as seen:
        Checkpoint(saved).job_state()
    assert seen


def loads(strategy: str, path: Path) -> list[str]:
    """In each rank: load as a resume does, twice; what happened the second time, when
    all code is imported.
    """
    given = {
        "strategy": strategy,
        "strategy_options": WAYS[strategy],
        "global_batch_size": 12,
        "lr": 0.01,
    }
    rank_info = join() or RankInfo()
    config = RunConfig.model_validate(
        given
        | {
            "nproc": rank_info.size,
            "epochs": 3,
            "device": "cpu",
            "schedule": {"name": "linear", "warmup_steps": 2},
        }
    )
    task = Slow(dropout=0.1)
    resolved = resolve(config, rank_info.size, rank_info.launcher, task=task)
    hooks, world = set_up(resolved, rank_info)
    run = build_run(resolved.config, hooks, world, task, task.prepare(resolved.config))
    checkpoint.load(run, hooks, path)
    with watched() as seen:
        checkpoint.load(run, hooks, path)
    del run
    hooks.teardown(world)
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", WAYS)
def test_loading_a_checkpoint_does_nothing_of_that(strategy: str, saved: Path) -> None:
    if strategy not in registry.offers("strategies"):
        pytest.skip(f"{strategy} is not installed")
    ranks = 1 if strategy == "single" else 2
    assert launch(partial(loads, strategy, saved), nproc=ranks, timeout=120) == [[]] * ranks
