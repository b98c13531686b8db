"""The model of a run: build it whole or on the meta device, and apply the config's changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distcore.config import RunConfig
from distcore.errors import ConfigError, MetaModelError, ModelError
from distcore.launchers.processes.failures import one_line
from distcore.model.adapters import adapted, adapter_of
from distcore.model.compiling import compile_model
from distcore.model.dropout import draw_cheaply
from distcore.model.hooks_on_gradients import gradient_hooks
from distcore.model.lora_base import base_of
from distcore.model.optim import check_optimizer, freeze, is_plugin, optimizer_class
from distcore.model.pretrained_slices import check_values, replay_files
from distcore.model.running_statistics import count_each_batch_once
from distcore.plugin.strategy.capabilities import ChecksModel
from distcore.plugin.strategy.contract import (
    BaseModelRef,
    BuiltModel,
    Compilations,
    ModelSource,
    WeightStream,
)
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.task import Datasets, Task

log = logging.getLogger("distcore")


def model_source(config: RunConfig, task: Task, data: Datasets) -> ModelSource:
    """Return how to build the task's model with the run's adapter: whole, or on the meta device."""
    base = base_source(config, task, data)
    if config.lora.rank is None:
        return base
    is_known_by_values = not base.folder and not BoundTask.wrap(task).from_scratch
    return adapted(config, base, is_known_by_values=is_known_by_values)


def set_up_module(
    config: RunConfig, task: Task, module: nn.Module, training: bool
) -> tuple[BaseModelRef | None, Compilations | None]:
    """Apply the config's changes to a built model, before a strategy wraps it.

    They are checkpointing, freezing, running statistics, dropout and compilation.

    Returns the base of its adapter, if any, and the counts of compilations. Raises ConfigError if
    the model lacks gradient checkpointing, ModelError if none of it can be trained.
    """
    if config.gradient_checkpointing:
        enable_recomputation(module)
    base = base_of(config, task, module)
    freeze(config, module)
    if training and not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(
            f"model {type(module).__name__}: none of its parameters requires a gradient; nothing to"
            " train"
        )
    if training:
        count_each_batch_once(module)
    if config.dropout_masks == "rank":
        draw_cheaply(config, module)
    if base and training:
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        every = sum(p.numel() for p in module.parameters())
        log.info("lora: %s of %s parameters are trained", f"{trained:,}", f"{every:,}")
        if kinds := adapter_of(config).adapted_kinds(module):
            log.info("lora: %s", kinds)
    return base, compile_model(config, module) if training else None


def enable_recomputation(module: nn.Module) -> None:
    """Let a model recompute its layers in the backward pass.

    Raises ConfigError for one that does not offer it.

    Each model of transformers has the method; those that cannot recompute say so by an attribute,
    or refuse the call.
    """
    problem = f"gradient_checkpointing: {type(module).__name__} does not offer it; leave it off"
    # Transformers 5.23 renamed it.
    enable: Any = getattr(module, "activation_checkpointing_enable", None)
    enable = enable or getattr(module, "gradient_checkpointing_enable", None)
    if enable is None or getattr(module, "supports_gradient_checkpointing", True) is False:
        raise ConfigError(problem)
    try:
        enable()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{problem} ({' '.join(str(error).split())})") from None


def check_model(config: RunConfig, task: Task, data: Datasets, strategy: object) -> None:
    """Raise DistcoreError if config or strategy need layers that the model lacks.

    The config names layers in ``freeze``, ``lora``, groups of parameters, ``layer_decay``, and by
    an optimizer for some layers only; a task names them in its phases. A model that cannot be built
    on the meta device is checked later, by the ranks.
    """
    phases = BoundTask.wrap(task).losses.phases
    if not (isinstance(strategy, ChecksModel) or phases or _names_layers(config)):
        return
    with suppress(MetaModelError):
        module = model_source(config, task, data).meta_model()
        freeze(config, module)
        check_optimizer(config, module, phases)
        if isinstance(strategy, ChecksModel):
            strategy.check_model(config, module)


def _names_layers(config: RunConfig) -> bool:
    """Return True if the config, or its optimizer, tells layers of the model apart."""
    optimizer = config.optimizer
    if optimizer.groups or optimizer.layer_decay is not None:
        return True
    if config.freeze is not None or config.lora.rank is not None:
        return True
    return is_plugin(optimizer.name) and not optimizer_class(optimizer.name).elementwise


def base_source(config: RunConfig, task: Task, data: Datasets) -> ModelSource:
    """Return how to build the task's model without an adapter."""
    make = partial(task.build_model, config, data)
    return source_of(config, make, BoundTask.wrap(task).weights_folder(config))


def source_of(config: RunConfig, make: Callable[[], nn.Module], folder: Path | None) -> ModelSource:
    """Return how to build the model of ``make``, with weights from ``folder``, if any."""

    def build() -> nn.Module:
        torch.manual_seed(config.seed)
        module = make()
        if folder:
            check_values(module, folder)
        return module

    def as_made() -> nn.Module:
        try:
            with torch.device("meta"):
                module = make()
        except ModelError:  # nor could a whole model be built
            raise
        except Exception as error:
            # Of any class: code of the task that needs values may fail in any way.
            reason = one_line(f"{type(error).__name__}: {error}", limit=200)
            raise MetaModelError(f"build_model() fails on the meta device: {reason}") from error
        _check_nothing_is_lost(module)
        return module

    def meta_model() -> nn.Module:
        # A whole load of files in 16 bits gives fp32, too.
        return as_made().float() if folder else as_made()

    def replay() -> tuple[nn.Module, WeightStream]:
        if folder:
            made = as_made()
            _check_no_hooks(made)
            convert = getattr(made, "safetensors_folder", None)
            return replay_files(made, convert() if convert else folder, config.seed)
        from distcore.model.deferred_init.replay import replay_build  # fake tensors import slowly

        made = meta_model()
        _check_no_hooks(made)
        return replay_build(make, made, config.seed)

    return ModelSource(build=build, meta_model=meta_model, folder=folder, replay=replay)


def _check_no_hooks(meta_model: nn.Module) -> None:
    """Raise MetaModelError for a hook on a gradient: a mask that it reads has no values either."""
    for name in gradient_hooks(meta_model):
        raise MetaModelError(f"build_model() registers a hook on the gradient of {name}")


def _check_nothing_is_lost(meta_model: nn.Module) -> None:
    """Raise MetaModelError for values that the meta device kept, or that no stream would fill."""
    for name, parameter in meta_model.named_parameters():
        if not parameter.is_meta:
            raise MetaModelError(f"build_model() gives {name} values, on the meta device too")
    for path, module in meta_model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                where = f"{path}.{name}" if path else name
                raise MetaModelError(
                    f"build_model() keeps a tensor as {where}, which is no parameter and no buffer"
                )


def build_in_parts(
    source: ModelSource, strategy: str, parts: Callable[[], tuple[nn.Module, Any]] | None
) -> BuiltModel:
    """Return a meta model with its weights as state, or a whole model without state.

    ``parts``, such as ``source.replay``, returns the meta model and a source of its weights. The
    model is built whole if ``parts`` is ``None`` or raises MetaModelError; the log then gives the
    reason and the ``strategy``.
    """
    if parts is None:
        return BuiltModel(model=source.build())
    try:
        model, weights = parts()
    except MetaModelError as reason:
        log.info("%s: every rank builds the whole model: %s", strategy, reason)
        return BuiltModel(model=source.build())
    return BuiltModel(model=model, state=weights)
