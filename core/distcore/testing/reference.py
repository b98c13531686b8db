"""The same job in plain PyTorch, in one process: the whole global batch at once, and none of the core's loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distcore.checkpoint.distance import difference
from distcore.config import RunConfig
from distcore.plugin.sampling import training_plan
from distcore.plugin.task import Datasets
from distcore.testing.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What training in one process comes to; ``norms`` are those of the gradient before clipping, one a step."""

    module: nn.Module
    state: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    rates: list[float]


def solve(problem: Problem, config: RunConfig, steps: int) -> Solution:
    """Train on the problem's own rows for ``steps`` of a run of ``config.max_steps`` optimizer steps.

    The same for every strategy: solved once per process. The solution is shared, so do not write to it.
    """
    neutral = config.model_copy(update={"strategy": "single", "strategy_options": {}, "nproc": 1})
    return _solve(problem, neutral.model_dump_json(), steps)


@cache
def _solve(problem: Problem, text: str, steps: int) -> Solution:
    config = RunConfig.model_validate_json(text)
    data = problem.prepare(config)
    module = untrained(problem, config, data)
    optimizer = _adamw(module, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(config, step))
    losses, norms, rates = [], [], []
    for rows, _ in zip(_global_batches(config, data), range(steps), strict=False):
        with _autocast(config):
            loss = problem.loss(module, data.train.batch(rows)) / int(data.train.items[rows].sum())
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        norms.append(_clip(module, config))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return Solution(module=module, state=state_of(module, optimizer), losses=losses, norms=norms, rates=rates)


def untrained(problem: Problem, config: RunConfig, data: Datasets) -> nn.Module:
    """The model as every run begins with it."""
    torch.manual_seed(config.seed)
    return problem.build_model(config, data)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and moments by the names that a checkpoint gives them."""
    parameters = dict(module.named_parameters())
    state = {f"model/{name}": value.detach() for name, value in (parameters | dict(module.named_buffers())).items()}
    for name, parameter in parameters.items():
        state |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return state


def _global_batches(config: RunConfig, data: Datasets) -> Iterator[np.ndarray]:
    plan = training_plan(config, data.train)
    epoch = 0
    while True:
        yield from (plan.rows(epoch, step) for step in range(plan.steps))
        epoch += 1


def _adamw(module: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    assert isinstance(config.lr, float)  # cases state it
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    plain = [p for name, p in trained.items() if name.endswith("bias") or ".norm." in name]
    decayed = [p for name, p in trained.items() if not (name.endswith("bias") or ".norm." in name)]
    settings = config.optimizer
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, foreach=False
    )


def _clip(module: nn.Module, config: RunConfig) -> float:
    parameters = [p for p in module.parameters() if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, config.clip.norm or float("inf"))
    if config.clip.value is not None:
        nn.utils.clip_grad_value_(parameters, config.clip.value)
    return float(norm)


def _rate(config: RunConfig, step: int) -> float:
    """Share of the peak rate: linear warm-up, then linear to zero, unless the rate is constant."""
    if config.schedule.name == "constant":
        return 1.0
    warmup, total = int(config.schedule.warmup_steps), int(config.max_steps or 0)
    return step / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))


def _autocast(config: RunConfig) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if config.precision == "bf16" else nullcontext()


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative L2 distance of a tensor from what it should be, and the name of that tensor."""
    if missing := sorted(expected.keys() - found.keys()):
        return float("inf"), f"{len(missing)} tensors are missing, first {missing[0]}"
    distances = {name: difference(found[name], value).relative for name, value in expected.items()}
    worst = max(distances, key=lambda name: (distances[name] != distances[name], distances[name]))
    return distances[worst], worst
