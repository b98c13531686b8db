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
    """Return ``run``, whose model is wrapped, with the frozen models of its
    task; every rank calls.
    """
    bound, models, named = (
        BoundTask.wrap(task),
        dict[str, Callable[..., Any]](),
        dict[str, BaseModelRef](),
    )
    of_base: list[str] = []  # models that are the trained one without its adapter
    for name, given in bound.frozen(run.config, data).items():
        if given == INITIAL and run.base is not None:
            of_base.append(name)
            named[name] = run.base
        else:
            models[name], named[name] = _prepared(run, hooks, bound, data, given)
    return replace(consulting(run, bound, models, of_base), frozen=named)


def consulting(
    run: Run, task: BoundTask, models: Mapping[str, Callable[..., Any]], of_base: Iterable[str] = ()
) -> Run:
    """Return ``run`` with a ``consult`` that asks ``models``, which the strategy has prepared.

    Each name of ``of_base`` is the trained model without its adapter.
    """
    trains, evaluates = (
        autocast_for(run.config, run.capabilities, run.world, when) for when in (False, True)
    )

    @torch.no_grad()
    def consult(batch: Batch, training: bool = True) -> Batch:
        without_adapter = dict.fromkeys(of_base, partial(_without_adapter, run, training))
        with trains if training else evaluates:
            return task.consult({**models, **without_adapter}, batch)

    return replace(run, consult=consult)


def hold_frozen(run: Run, hooks: Hooks, module: nn.Module, state: Any = None) -> nn.Module:
    """Return a frozen model as the strategy holds it, for evaluation; ``state`` is that of
    ``build_model``.
    """
    beside = replace(
        run, module=module, model=module, optimizer=None, strategy_state=state, base=None
    )
    model = hooks.wrap_model(beside, module, None).model
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
    source = frozen_source(run.config, task, data, given)
    built = hooks.build_model(run.config, run.world, source)
    module = built.model.requires_grad_(False)
    seed = run.config.seed if given == INITIAL and task.from_scratch else None
    # A model in parts has no values yet, but the digest of a model without files needs all values.
    needs_values = (
        source.folder is None and seed is None and any(p.is_meta for p in module.parameters())
    )
    whole = source.build() if needs_values else module
    named = named_by_content(
        whole, source.folder, seed, frozenset(name for name, _ in whole.named_parameters())
    )
    return hold_frozen(run, hooks, module, built.state), named


def _without_adapter(run: Run, training: bool, *given: Any, **named: Any) -> Any:
    """Return what the model answers without its adapter; then put it back into the mode that
    the run is in.
    """
    set_mode(run, training=False)
    try:
        with adapter_of(run.config).off(run.module):
            return run.model(*given, **named)
    finally:
        set_mode(run, training)
