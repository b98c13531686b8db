"""Ranks of another launcher that die for want of memory say what the job needs, too, and
what to try next.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import too_little

from distcore import load_config
from distcore_workbench.planning.out_of_memory import next_step


# the plan has 25 seconds, too few for its imports on a machine full of other tests
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.programs
def test_a_rank_of_torchrun_under_a_limit_says_what_the_plan_would_have_said(
    work_folder: Path,
) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m distcore"
    job = "train --strategy ddp --task own.py:Own --lr 0.01 --max-steps 1 --set device=cpu"
    _, lines = too_little.run(work_folder, f"{torchrun} {job} --out run")
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1, lines
    assert "can't allocate memory" in said[0]
    assert "; the plan needs " in said[0]
    assert too_little.SAID in said[0]


def test_the_remedy_under_sharded_parameters_is_more_ranks_or_offloading() -> None:
    config = load_config(
        None, {"micro_batch_size": 1, "gradient_checkpointing": True, "strategy": "fsdp"}
    )
    assert next_step(config).startswith("more ranks, or offload")
