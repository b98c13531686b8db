"""Three ranks send sums: a mean of three, and a loss that is scaled for it, would round
every gradient twice more.
"""

from __future__ import annotations

import copy
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distcore import RunConfig, launch
from distcore.testing.problem import Problem
from distcore.testing.rank import lab_of
from distcore.testing.subject import Subject

RANKS = 3
STRATEGIES: list[Any] = [
    pytest.param("ddp", {}, marks=pytest.mark.needs("distcore-ddp")),
    pytest.param("fsdp", {}, marks=pytest.mark.needs("distcore-fsdp")),
    pytest.param(
        "mesh", {"shard": 3}, marks=[pytest.mark.needs("distcore-mesh"), pytest.mark.slow]
    ),
    pytest.param("horovod", {}, marks=[pytest.mark.needs("distcore-horovod"), pytest.mark.slow]),
    pytest.param(
        "accelerate", {}, marks=[pytest.mark.needs("distcore-accelerate"), pytest.mark.slow]
    ),
    pytest.param(
        "deepspeed", {"stage": 0}, marks=[pytest.mark.needs("distcore-deepspeed"), pytest.mark.slow]
    ),
    pytest.param(
        "deepspeed", {"stage": 1}, marks=[pytest.mark.needs("distcore-deepspeed"), pytest.mark.slow]
    ),
    pytest.param("deepspeed", {"stage": 2}, marks=pytest.mark.needs("distcore-deepspeed")),
]


def elements_that_are_no_sum(
    folder: Path, strategy: str, options: dict[str, Any]
) -> tuple[int, int]:
    """Elements of a step's gradient that are no sum of what the ranks have, in any order;
    and all of them.
    """
    config = RunConfig(strategy=strategy, strategy_options=options, nproc=RANKS, device="cpu")
    with lab_of(Subject(config=config, cases=()), folder) as lab:
        # Without a first beta the first moment is the gradient.
        optimizer = {"eps": 1e-2, "weight_decay": 0.1, "betas": [0.0, 0.999]}
        job = lab.job(Problem(), micro_batch_size=4, optimizer=optimizer, clip={"norm": None})
        alone = lab.build_alone(Problem())
        (micro,) = job.rows(0, 0)
        shares = lab.share(
            own_share(alone.run.module, job.data.train, micro.indices, lab.global_batch)
        )
        state = job.train(1).state
    other = total = 0
    for name in shares[0]:
        sent = [torch.tensor(share[name]) for share in shares]
        gradient = state[f"optimizer/{name}/exp_avg"].flatten()
        sums = [(first + second) + third for first, second, third in permutations(sent)]
        is_sum = torch.stack([gradient == each for each in sums]).any(0)
        other, total = other + int((~is_sum).sum()), total + is_sum.numel()
    return other, total


def own_share(
    module: nn.Module, rows: Any, indices: np.ndarray, items: int
) -> dict[str, list[float]]:
    """The gradient of these rows' share of the mean loss, in plain PyTorch."""
    model = copy.deepcopy(module).train()
    (Problem().loss(model, rows.batch(indices)) * (1 / items)).backward()
    return {
        name: p.grad.flatten().tolist()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "options"), STRATEGIES)
def test_the_gradient_of_three_ranks_is_the_sum_of_theirs(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for other, total in launch(elements_that_are_no_sum, tmp_path, strategy, options, nproc=RANKS):
        assert total > 1000
        assert other == 0
