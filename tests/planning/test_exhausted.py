"""A run that dies for want of memory says what it needs and what to try next."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from distcore import load_config
from distcore.cli.exhausted import MESSAGE
from distcore.planning.exhausted import next_step

LIMIT = 2 * 2**30


@pytest.mark.parametrize(
    ("changes", "too_large", "said"),
    [
        ({"micro_batch_tokens": 4096}, False, "--micro-batch-tokens 2048"),
        ({"micro_batch_size": 8}, False, "--micro-batch-size 4"),
        ({"micro_batch_size": 1}, False, "--set gradient_checkpointing=true"),
        ({"micro_batch_size": 8}, True, "a strategy that shards parameters, on more devices: "),
        ({"micro_batch_size": 1, "gradient_checkpointing": True, "strategy": "fsdp"}, False, "more ranks, or offload"),
    ],
)
def test_the_next_step_of_the_ladder(changes: dict[str, object], too_large: bool, said: str) -> None:
    assert next_step(load_config(None, changes), too_large).startswith(said)


def test_one_row_cannot_be_cut_further() -> None:
    config = load_config(None, {"micro_batch_tokens": 4096})
    assert next_step(config, is_one_row=True) == "--set gradient_checkpointing=true"


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
        "rank 1 of 2 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_messages_are_known(message: str) -> None:
    assert MESSAGE.search(message)


@pytest.mark.programs
def test_a_run_under_a_limit_says_what_the_plan_would_have_said(work_folder: Path) -> None:
    (work_folder / "own.py").write_text(
        "import torch\n"
        "from distcore.tasks.text_classification.task import TextClassification\n"
        "class Own(TextClassification):\n"
        "    def build_model(self, config, data):\n"
        "        model = super().build_model(config, data)\n"
        "        model.more = torch.nn.Linear(24000, 24000)  # 2.3 GB in one block\n"
        "        return model\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    command = "train --data rows.json --task own.py:Own --model bert-tiny --max-steps 1 --set device=cpu --out run"
    done = subprocess.run(
        [sys.executable, "-m", "distcore", *command.split()], preexec_fn=limit, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    said = done.stderr.splitlines()[-1]
    assert "can't allocate memory" in said
    assert "the plan needs" in said
    assert "2.00 GiB are available; next: a strategy that shards parameters" in said
