"""LoRA is one run under every strategy, for every task with a transformers model; checkpoints go
from any to any.

Laws 2, 5 and 7 where nothing but an adapter is trained, from random weights and from a folder, of
which ``fsdp`` reads slices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import image_cases
import pytest
import strategy_chain
import work_folder

from distcore import RunConfig, train
from distcore.cli.main import main

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TASKS = Path(__file__).parents[2] / "plugins/tasks/tests"
JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text-classification": ("bert-tiny", "text_classification/rows.json", {"max_seq_len": 8}),
    "token-classification": ("bert-tiny", "token_classification/words.jsonl", {"max_seq_len": 16}),
    "causal-lm": ("gpt2-tiny", "causal_lm/documents.jsonl", {"max_seq_len": 32}),
    "masked-lm": ("bert-tiny", "masked_lm/texts.jsonl", {"max_seq_len": 16}),
    "seq2seq": ("t5-tiny", "seq2seq/pairs.jsonl", {"max_seq_len": 16}),
    "image-classification": ("vit-tiny", "", {}),
}
"""Task, to a built-in model, a data file and other options."""
EVERY_WAY = ("ddp", "fsdp", "deepspeed:1", "deepspeed:2", "deepspeed:3", "horovod", "accelerate")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_folder.enter(tmp_path, monkeypatch)
    return tmp_path


def config(task: str, here: Path, **changes: Any) -> RunConfig:
    model, data, options = JOBS[task]
    file = str(TASKS / data) if data else str(image_cases.in_folders(here / "images", 24))
    options = {"model": model, "data": file, "dropout": 0.0, "eval_fraction": 0.25} | options
    tree: dict[str, Any] = {
        "task": task,
        "task_options": options | changes.pop("task_options", {}),
        "lora": {"rank": 3},
        "lr": 1e-2,
        "global_batch_size": 8,
        "max_steps": 2,
        "device": "cpu",
        "log_every": 1,
        "schedule": {"name": "constant"},
        "extensions": {"progress": False},
    }
    return RunConfig(**tree | changes)


def folder_of(task: str, here: Path) -> Path:
    """A model folder, trained for a step without an adapter."""
    train(config(task, here, lora={}, max_steps=1, out=str(here / "whole")))
    assert main(["checkpoint", "export", str(here / "whole"), "--to", str(here / "model")]) == 0
    return here / "model"


def is_one_run(task: str, here: Path, ways: tuple[str, ...], **changes: Any) -> None:
    train(
        config(
            task,
            here,
            **changes,
            out=str(here / "single"),
            max_steps=len(ways) * strategy_chain.STEPS,
        )
    )
    strategy_chain.run_chain(
        here / "chain", lambda **more: config(task, here, **changes, **more), ways
    )
    strategy_chain.assert_one_run(here / "chain", here / "single", ways)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", JOBS)
def test_every_task_is_one_run_from_a_folder(task: str, here: Path) -> None:
    options = {"model": str(folder_of(task, here))}
    is_one_run(task, here, strategy_chain.WAYS, task_options=options)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes", [{}, {"lora": {"rank": 3, "targets": ["query", "dense"]}, "clip": {"norm": 0.01}}]
)
def test_random_weights_are_one_run_under_every_strategy(
    changes: dict[str, Any], here: Path
) -> None:
    is_one_run("text-classification", here, EVERY_WAY, **changes)


@pytest.mark.timeout(900)
def test_a_rank_and_a_checkpoint_hold_what_an_adapter_needs(here: Path) -> None:
    """Optimizer state, peak and checkpoint with LoRA and without, against the
    bounds of the benchmark.
    """
    benchmark = Path(__file__).parents[2] / "benchmarks/lora_memory.py"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(benchmark),
        "--model",
        "bert-mini",
        "single",
        "fsdp",
        "deepspeed:3",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
