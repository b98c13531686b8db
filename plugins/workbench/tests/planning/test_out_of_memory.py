"""A run that dies for want of memory says what it needs and what to try next."""

from __future__ import annotations

from pathlib import Path

import pytest
import too_little

from distcore import load_config
from distcore_workbench.planning.memory_errors import MESSAGE
from distcore_workbench.planning.out_of_memory import next_step


@pytest.mark.parametrize(
    ("changes", "too_large", "said"),
    [
        ({"micro_batch_tokens": 4096}, False, "--micro-batch-tokens 2048"),
        ({"micro_batch_size": 8}, False, "--micro-batch-size 4"),
        ({"micro_batch_size": 1}, False, "--set gradient_checkpointing=true"),
        ({"micro_batch_size": 8}, True, "a strategy that shards parameters, on more devices: "),
    ],
)
def test_the_next_step_of_the_ladder(
    changes: dict[str, object], too_large: bool, said: str
) -> None:
    assert next_step(load_config(None, changes), too_large).startswith(said)


def test_a_micro_batch_of_one_row_cannot_be_cut_further() -> None:
    config = load_config(None, {"micro_batch_tokens": 4096})
    assert next_step(config, is_one_row=True) == "--set gradient_checkpointing=true"


@pytest.mark.parametrize(
    "message",
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
            " memory: you tried"
        ),
        "rank 1 of 2 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_messages_are_known(message: str) -> None:
    assert MESSAGE.search(message)


@pytest.mark.programs
def test_a_run_under_a_limit_says_what_the_plan_would_have_said(work_folder: Path) -> None:
    job = "train --task own.py:Own --lr 0.01 --max-steps 1 --set device=cpu --out run"
    code, lines = too_little.run(work_folder, f"-m distcore {job}")
    assert code == 3, lines
    assert "can't allocate memory" in lines[-1]
    assert "the plan needs" in lines[-1]
    assert too_little.SAID in lines[-1]
