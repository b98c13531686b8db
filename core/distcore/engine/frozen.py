"""Frozen models of a task. The strategy prepares each like the model of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from distcore.config import RunConfig
from distcore.engine.mode import set_mode
from distcore.engine.precision import autocast_for
from distcore.model.adapters import adapter_of
from distcore.model.lora_base import named_by_content
from distcore.model.model_source import base_source, source_of
from distcore.plugin.strategy.contract import BaseModelRef, ModelSource, Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.frozen import INITIAL, FrozenModel, Initial
from distcore.plugin.task.task import Batch, Datasets, Task


def with_frozen(run: Run, hooks: Hooks, task: Task, data: Datasets) -> Run:
    """Return ``run``, whose model is wrapped, with the task's frozen models; every rank calls."""
    bound = BoundTask.wrap(task)
    models: dict[str, Callable[..., Any]] = {}
    references: dict[str, BaseModelRef] = {}
    of_base: list[str] = []  # models that are the trained one without its adapter
    for name, frozen in bound.frozen(run.config, data).items():
        if frozen == INITIAL and run.base is not None:
            of_base.append(name)
            references[name] = run.base
        else:
            models[name], references[name] = _prepared(run, hooks, bound, data, frozen)
    return replace(consulting(run, bound, models, of_base), frozen=references)


def consulting(
    run: Run, task: BoundTask, models: Mapping[str, Callable[..., Any]], of_base: Iterable[str] = ()
) -> Run:
    """Return ``run`` with a ``consult`` that asks ``models``, which the strategy has prepared.

    Each name of ``of_base`` is the trained model without its adapter.
    """
    train_autocast = autocast_for(run.config, run.capabilities, run.world)
    eval_autocast = autocast_for(run.config, run.capabilities, run.world, evaluates=True)

    @torch.no_grad()
    def consult(batch: Batch, training: bool = True) -> Batch:
        without_adapter = dict.fromkeys(of_base, partial(_without_adapter, run, training))
        with train_autocast if training else eval_autocast:
            return task.consult({**models, **without_adapter}, batch)

    return replace(run, consult=consult)


def hold_frozen(run: Run, hooks: Hooks, module: nn.Module, state: Any = None) -> nn.Module:
    """Return a frozen model as the strategy holds it, for evaluation.

    ``state`` is that of ``build_model``.
    """
    alone = replace(
        run, module=module, model=module, optimizer=None, strategy_state=state, base=None
    )
    model = hooks.wrap_model(alone, module, None).model
    model.eval()  # not in one line: a wrapper's answer need not be itself
    return model


def frozen_source(
    config: RunConfig, task: BoundTask, data: Datasets, given: FrozenModel | Initial
) -> ModelSource:
    """Return how to build a frozen model that is one of its own."""
    if isinstance(given, FrozenModel):
        return source_of(config, partial(given.build, config, data), given.folder)
    return base_source(config, task, data)


def _prepared(
    run: Run, hooks: Hooks, task: BoundTask, data: Datasets, given: FrozenModel | Initial
) -> tuple[nn.Module, BaseModelRef]:
    """Return a frozen model as the strategy has it, and a reference to its weights."""
    source = frozen_source(run.config, task, data, given)
    built = hooks.build_model(run.config, run.world, source)
    module = built.model.requires_grad_(False)
    seed = run.config.seed if given == INITIAL and task.from_scratch else None
    # A model in parts has no values yet, but the digest of a model without files needs all values.
    is_known_by_values = source.folder is None and seed is None
    has_no_values = any(parameter.is_meta for parameter in module.parameters())
    whole = source.build() if is_known_by_values and has_no_values else module
    names = frozenset(name for name, _ in whole.named_parameters())
    reference = named_by_content(whole, source.folder, seed, names)
    return hold_frozen(run, hooks, module, built.state), reference


def _without_adapter(run: Run, training: bool, *arguments: Any, **named: Any) -> Any:
    """Return the model's outputs without its adapter; then set the mode of the run again."""
    set_mode(run, training=False)
    try:
        with adapter_of(run.config).off(run.module):
            return run.model(*arguments, **named)
    finally:
        set_mode(run, training)
