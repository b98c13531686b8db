"""The reference: the same training in plain PyTorch, in one process; it shares nothing
with the core's loop.
"""

from __future__ import annotations

import math
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
    """Train as ``solve`` does; ``text`` is the config in JSON, which a cache can compare."""
    config = RunConfig.model_validate_json(text)
    # The device of the run: the kernels of another one round differently.
    device = torch.device(config.device)
    data = problem.prepare(config)
    module = build_untrained(problem, config, data).to(device)
    initial = build_untrained(problem, config, data).to(device)
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
        losses_of_phases, squared_norms = [], []
        for optimizer, mean_loss in phases:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = mean_loss(module, initial, dataset, rows)
            module.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            if isinstance(problem, Climbing):

                def second_pass(mean_loss: MeanLoss = mean_loss, rows: np.ndarray = rows) -> None:
                    module.zero_grad()
                    loss = mean_loss(module, initial, dataset, rows)
                    loss.backward()  # type: ignore[no-untyped-call]

                parameters = module.parameters()
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                problem.climb(trained, nn.utils.get_total_norm, second_pass)
            losses_of_phases.append(loss.item())
            # Those of this phase alone: the gradients of others are not clipped with them.
            stepped: list[nn.Parameter] = []
            for group in optimizer.param_groups:
                stepped += group["params"]
            squared_norms.append(clip_gradients(stepped, config.clip) ** 2)
            scaler.step(optimizer)
            scaler.update()
        losses.append(sum(losses_of_phases))
        norms.append(sum(squared_norms) ** 0.5)
        rates.append(optimizers[-1].param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    state: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for name, value in state_of(module, optimizer).items():
            state[name] = value.cpu()
    return Solution(module=module.cpu(), state=state, losses=losses, norms=norms, rates=rates)


MeanLoss = Callable[[nn.Module, nn.Module, Dataset, np.ndarray], Tensor]


def _phases(
    problem: Problem, module: nn.Module, config: RunConfig
) -> list[tuple[torch.optim.AdamW, MeanLoss]]:
    """Return optimizer and mean loss of each phase of a step; without phases there is one."""
    if not isinstance(problem, Phased):
        return [(_adamw(module, config), problem.mean_loss)]

    def mean(loss: Callable[..., Any]) -> MeanLoss:
        def mean_loss(
            module: nn.Module, began: nn.Module, dataset: Dataset, rows: np.ndarray
        ) -> Tensor:
            total: Tensor = loss(module, dataset.batch(rows))
            return total / int(dataset.items[rows].sum())

        return mean_loss

    phases = []
    for phase in problem.phases().values():
        optimizer = _adamw(module, config, phase.match, phase.optimizer)
        phases.append((optimizer, mean(phase.loss)))
    return phases


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
    tensors = parameters | dict(module.named_buffers())
    state = {f"model/{name}": value.detach() for name, value in tensors.items()}
    for name, parameter in parameters.items():
        moments = optimizer.state.get(parameter, {})  # none of frozen and unused parameters
        for key, value in moments.items():
            state[f"optimizer/{name}/{key}"] = value
    return state


def _adamw(
    module: nn.Module, config: RunConfig, match: str = "", settings: Mapping[str, Any] | None = None
) -> torch.optim.AdamW:
    """Return the optimizer of the trained parameters whose names match ``match``.

    Each is a group of its own, so that no rule about groups of the core is used. ``settings`` are
    those of a phase.
    """
    assert isinstance(config.lr, float)  # every case sets it
    options = {**config.optimizer.options, **(settings or {})}
    options["lr"] = config.lr * options.pop("lr_scale", 1.0)
    groups: list[dict[str, Any]] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or not re.search(match, name):
            continue
        rules = (rule for rule in config.optimizer.groups if re.search(rule.match, name))
        rule = next(rules, None)
        lr_scale = (rule and rule.lr_scale) or 1.0
        group = {"params": [parameter], "lr": options["lr"] * lr_scale}
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
    """Return the factor of the learning rate in a step: of warm-up, then of linear decay."""
    if config.schedule.name == "constant":
        return 1.0
    warmup = int(config.schedule.warmup_steps)
    total = int(config.max_steps or 0)
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / (total - warmup))


def largest_difference(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[float, str]:
    """Return the largest relative L2 distance of a tensor from the expected one, infinite without
    it, and its name.
    """
    if missing := sorted(expected.keys() - actual.keys()):
        return float("inf"), f"{len(missing)} tensors are missing, first {missing[0]}"
    distances = {}
    for name, value in expected.items():
        distances[name] = difference(actual[name], value).relative
    # NaN is the worst, though it is greater than no number.
    worst = max(distances, key=lambda name: (math.isnan(distances[name]), distances[name]))
    return distances[worst], worst
