"""The reference: the same training in plain PyTorch, in one process; it shares nothing
with the core's loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distcore.checkpoint.distance import difference
from distcore.config import RunConfig, with_changes
from distcore.engine.loader import to_device
from distcore.engine.replay import clip_gradients, global_batches
from distcore.model.optimizers.adam import can_fuse
from distcore.plugin.batching.sampling import training_plan
from distcore.plugin.task.datasets import counts_of
from distcore.plugin.task.task import Dataset, Datasets
from distcore.testing.problem import Problem
from distcore.testing.variants import Climbing, Phased


@dataclass(frozen=True, kw_only=True)
class Series:
    """The result of some optimizer steps."""

    losses: list[float]
    """Mean loss over the items of the global batch, one value per step; the same on every rank."""
    norms: list[float]
    """L2 norm of the gradient before clipping, one value per step; NaN if a strategy
    did not report it.
    """
    rates: list[float]
    """Learning rate of the optimizer's first group, one value per step: here of the step,
    of a job after it.
    """
    state: Mapping[str, Tensor]
    """All tensors of a checkpoint after the last step, whole and on the CPU; the
    same on every rank.
    """


@dataclass(frozen=True, kw_only=True)
class Solution(Series):
    """The result of training in one process. It is cached and shared: do not change it."""

    module: nn.Module
    """The trained model."""


def solve(problem: Problem, config: RunConfig, steps: int) -> Solution:
    """Train for the first ``steps`` optimizer steps of a run, for all
    strategies once per process.
    """
    neutral = with_changes(config, {"strategy": "single", "strategy_options": {}, "nproc": 1})
    return _solve(problem, neutral.model_dump_json(), steps)


@cache
def _solve(problem: Problem, text: str, steps: int) -> Solution:
    config = RunConfig.model_validate_json(text)
    # of another one kernels round differently
    device, data = torch.device(config.device), problem.prepare(config)
    module, began = (build_untrained(problem, config, data).to(device) for _ in range(2))
    dataset: Any = SimpleNamespace(
        batch=lambda rows: to_device(data.train.batch(rows), device),
        items=data.train.items,
        counts=counts_of(data.train),
    )
    phases = _phases(problem, module, config)
    optimizers = [optimizer for optimizer, _ in phases]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: _rate(config, step))
        for each in optimizers
    ]
    losses, norms, rates = [], [], []
    for _, rows in islice(global_batches(training_plan(config, data.train)), steps):
        mean_losses, squares = [], []
        for optimizer, mean_loss in phases:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = mean_loss(module, began, dataset, rows)
            module.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            if isinstance(problem, Climbing):

                def again(mean_loss: MeanLoss = mean_loss, rows: np.ndarray = rows) -> None:
                    module.zero_grad()
                    mean_loss(module, began, dataset, rows).backward()  # type: ignore[no-untyped-call]

                trained = [
                    parameter for parameter in module.parameters() if parameter.requires_grad
                ]
                problem.climb(trained, nn.utils.get_total_norm, again)
            mean_losses.append(loss.item())
            stepped = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            squares.append(clip_gradients(stepped, config.clip) ** 2)
            scaler.step(optimizer)
            scaler.update()
        losses.append(sum(mean_losses))
        norms.append(sum(squares) ** 0.5)
        rates.append(optimizers[-1].param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    state = {
        name: value.cpu()
        for optimizer in optimizers
        for name, value in state_of(module, optimizer).items()
    }
    return Solution(module=module.cpu(), state=state, losses=losses, norms=norms, rates=rates)


MeanLoss = Callable[[nn.Module, nn.Module, Dataset, np.ndarray], Tensor]


def _phases(
    problem: Problem, module: nn.Module, config: RunConfig
) -> list[tuple[torch.optim.AdamW, MeanLoss]]:
    if not isinstance(problem, Phased):
        return [(_adamw(module, config), problem.mean_loss)]

    def mean(loss: Callable[..., Any]) -> MeanLoss:
        return lambda module, began, dataset, rows: (
            loss(module, dataset.batch(rows)) / int(dataset.items[rows].sum())
        )

    return [
        (_adamw(module, config, phase.match, phase.optimizer), mean(phase.loss))
        for phase in problem.phases().values()
    ]


def build_untrained(problem: Problem, config: RunConfig, data: Datasets) -> nn.Module:
    """Return the model as every run starts with it: built with torch's random
    state seeded by ``config.seed``.
    """
    torch.manual_seed(config.seed)
    return problem.build_model(config, data)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, ``model/NAME`` and
    ``optimizer/NAME/KEY``; they share memory.
    """
    parameters = dict(module.named_parameters())
    state = {
        f"model/{name}": value.detach()
        for name, value in (parameters | dict(module.named_buffers())).items()
    }
    for name, parameter in parameters.items():
        state |= {
            f"optimizer/{name}/{key}": value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
    return state


def _adamw(
    module: nn.Module, config: RunConfig, match: str = "", settings: Mapping[str, Any] | None = None
) -> torch.optim.AdamW:
    assert isinstance(config.lr, float)  # every case sets it
    options = {**config.optimizer.options, **(settings or {})}
    options["lr"] = config.lr * options.pop("lr_scale", 1.0)
    groups: list[dict[str, Any]] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and re.search(match, name):
            rule = next(
                (rule for rule in config.optimizer.groups if re.search(rule.match, name)), None
            )
            group = {"params": [parameter], "lr": options["lr"] * ((rule and rule.lr_scale) or 1.0)}
            if name.endswith("bias") or ".norm." in name:
                group["weight_decay"] = 0.0
            elif rule and rule.weight_decay is not None:
                group["weight_decay"] = rule.weight_decay
            groups.append(group)
    # The fused kernel of an accelerator rounds 1 - beta2 to fp32, so its moments differ by 1.3e-5
    # from the others'.
    fused = can_fuse(module) and next(module.parameters()).device.type != "cpu"
    return torch.optim.AdamW(groups, fused=fused, foreach=False, **options)


def _rate(config: RunConfig, step: int) -> float:
    if config.schedule.name == "constant":
        return 1.0
    warmup, total = int(config.schedule.warmup_steps), int(config.max_steps or 0)
    return step / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))


def largest_difference(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Return the largest relative L2 distance of a tensor from the expected one, infinite without
    it, and its name.
    """
    if missing := sorted(expected.keys() - actual.keys()):
        return float("inf"), f"{len(missing)} tensors are missing, first {missing[0]}"
    distances = {name: difference(actual[name], value).relative for name, value in expected.items()}
    worst = max(distances, key=lambda name: (distances[name] != distances[name], distances[name]))
    return distances[worst], worst
