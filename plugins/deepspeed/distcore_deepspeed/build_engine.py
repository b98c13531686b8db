"""Build DeepSpeed's engine around the model of a run, for training or for evaluation."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn

from distcore import (
    ConfigError,
    ModelError,
    OptimizerFactory,
    PreparedModel,
    Run,
    TaskError,
    WeightStream,
    defaults,
    dtensors,
)
from distcore_deepspeed import deferred_partitions, engine, library, ops
from distcore_deepspeed.json_config import Tree, UserConfig
from distcore_deepspeed.optimizers import optimizer_type
from distcore_deepspeed.resolve_config import resolve

log = logging.getLogger("distcore")


def build(
    user: UserConfig,
    run: Run,
    model: nn.Module,
    make_optimizer: OptimizerFactory | None,
    activation_checkpointing: bool = False,
) -> PreparedModel:
    """Build the engine, and the optimizer that it steps on this rank's partitions;
    no optimizer for evaluation.
    """
    tree = resolve(user, run, model, training=make_optimizer is not None)
    dtensors.make_contiguous(model)
    if user.stage == 3:
        _refuse_unsharded(model)
        refuse_transforms(model)
        # it reads the weights of layers that are not gathered then
        torch.backends.mha.set_fastpath_enabled(False)
    if activation_checkpointing:
        _checkpoint_activations(model, tree)
    values: WeightStream | None = run.strategy_state
    if make_optimizer is None:
        if values is not None:
            deferred_partitions.partition(model, values, tree)
        return PreparedModel(model=_wrap_for_evaluation(user, run, model, tree), optimizer=None)
    # before partitioning empties the parameters
    arguments = _optimizer_arguments(user, run, make_optimizer(model))
    exact = None if values is None else deferred_partitions.partition(model, values, tree)
    return engine.prepare(
        run, model, tree, lambda: library.initialize(model=model, config=tree, **arguments), exact
    )


def _refuse_unsharded(model: nn.Module) -> None:
    """Raise ModelError for what stage 3 cannot partition or gather."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    for name, parameter in trained:
        other, one = trained[0]
        if parameter.dtype != one.dtype:
            raise ModelError(
                f"parameters {other!r} ({one.dtype}) and {name!r} ({parameter.dtype}) have two"
                " dtypes, and DeepSpeed's stage 3 takes one: give them the same, or take another"
                " strategy, such as --strategy ddp"
            )
    for path, module in model.named_modules():
        if path and type(module).__name__ == "OptimizedModule":
            raise ModelError(
                f"the model's {path!r} is a result of torch.compile(), which DeepSpeed's stage 3"
                f" cannot hook: compile it in place by {path}.compile(), or take another strategy,"
                " such as --strategy ddp"
            )


def refuse_transforms(model: nn.Module) -> None:
    """Have each module with parameters raise TaskError where forward calls it inside of a transform
    of torch.func: stage 3 would gather its weights there, and the process would crash.
    """
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(partial(_refuse_transform, path))


def _refuse_transform(path: str, _module: nn.Module, _inputs: object) -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise TaskError(
            f"task: forward calls {path!r} inside of torch.func (grad, vmap, jvp …), where "
            "DeepSpeed's stage 3 cannot gather weights: use --set strategy_options.stage=2, or "
            "another strategy, such as --strategy ddp"
        )


def _optimizer_arguments(user: UserConfig, run: Run, optimizer: torch.optim.Optimizer) -> Tree:
    """Return the arguments of ``initialize`` for distcore's optimizer, or for DeepSpeed's
    with the same groups.
    """
    if optimizer_type(run.config, user) is not None:
        groups = [
            {key: group[key] for key in ("params", "lr", "weight_decay")}
            for group in optimizer.param_groups
        ]
        return {"model_parameters": groups}
    if user.offload("offload_optimizer") != "none" and run.world.is_main:
        name = type(optimizer).__name__
        log.info(
            "zero_force_ds_cpu_optimizer is false: the optimizer that is offloaded is %s", name
        )
    return {"optimizer": optimizer}


def _wrap_for_evaluation(user: UserConfig, run: Run, model: nn.Module, tree: Tree) -> nn.Module:
    """Shard the parameters at stage 3. The other stages shard nothing without an optimizer."""
    ops.build_for(tree)
    dtype = library.DTYPES[run.config.precision]
    if user.stage == 3:
        with engine.quiet():
            model = library.initialize(model=model, config=tree)
    else:
        model = model.to(device=run.world.device, dtype=dtype)
    if run.config.precision != "fp32":
        defaults.results_in_fp32(model, dtype)
    return model


def _checkpoint_activations(model: Any, tree: Tree) -> None:
    """Have the model recompute its layers with DeepSpeed's function."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            "strategy_options.activation_checkpointing: the model does not support it"
        )
    checkpointing.configure(None, deepspeed_config=tree)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = checkpointing.checkpoint
