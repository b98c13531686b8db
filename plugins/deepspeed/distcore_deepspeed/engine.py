"""Building DeepSpeed's engine around the model of a run."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from distcore import DistcoreError, OptimizerFactory, PreparedModel, Run, defaults, flat
from distcore_deepspeed import backend, ops, shards
from distcore_deepspeed.claims import model_dtype, offloaded, resolve
from distcore_deepspeed.loss_scale import dynamic_scale
from distcore_deepspeed.optimizers import optimizer_type
from distcore_deepspeed.settings import Tree

if TYPE_CHECKING:
    from distcore_deepspeed.strategy import DeepSpeedStrategy

log = logging.getLogger("distcore")


class LossScaleError(DistcoreError):
    """fp16 gradients overflow at the smallest loss scale."""

    exit_code = 3


def build_engine(
    options: DeepSpeedStrategy, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
) -> PreparedModel:
    """Return the engine, and the optimizer that it steps on this rank's shards."""
    tree = resolve(options, run, model, training=make_optimizer is not None)
    if options.activation_checkpointing:
        _checkpoint_activations(model, tree)
    if "nvme" in (offloaded(options, "offload_optimizer"), offloaded(options, "offload_param")):
        for builder in ops.nvme():
            ops.build(builder)
    if make_optimizer is None:
        return PreparedModel(model=_for_evaluation(options, run, model, tree), optimizer=None)
    exact = {name: p.data for name, p in model.named_parameters()} if run.config.precision != "fp32" else {}
    with _quiet():
        engine = backend.initialize(model=model, config=tree, **_optimizer(options, run, model, make_optimizer, tree))
    backend.limit_waiting(run.config.timeout)
    wrapped = PreparedModel(model=engine, optimizer=engine.basic_optimizer, loss_scale=dynamic_scale(engine.optimizer))
    if exact:
        # DeepSpeed took its master copies from a model that was already rounded to 16 bits.
        flat.copy_weights(shards.parts(replace(run, model=engine, optimizer=wrapped.optimizer)), exact)
        defaults.results_in_fp32(engine)
    if run.config.clip.value is not None and options.zero_stage > 0:
        defaults.clip_values_before_step(engine.basic_optimizer, run.config.clip.value)
    return wrapped


@contextmanager
def explained() -> Iterator[None]:
    """Turn DeepSpeed's last word about fp16 into one line that says what to do."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise LossScaleError(
            "fp16: gradients overflow at the smallest loss scale; models that were trained in bf16 (T5, Gemma, Llama "
            "and most newer ones) have values that fp16 cannot hold: use --precision bf16"
        ) from error


def _optimizer(
    options: DeepSpeedStrategy, run: Run, model: nn.Module, make_optimizer: OptimizerFactory, tree: Tree
) -> Tree:
    """The arguments of ``initialize`` that give it distcore's optimizer, or DeepSpeed's with the same groups."""
    optimizer = make_optimizer(model)
    if optimizer_type(run.config, options.given) is None:
        if offloaded(options, "offload_optimizer") != "none" and run.world.is_main:
            log.info("zero_force_ds_cpu_optimizer is false: the optimizer that is offloaded is torch's AdamW")
        return {"optimizer": optimizer}
    if tree["optimizer"]["type"] == "Lamb":
        ops.build(ops.lamb())
    elif tree["optimizer"]["params"].get("torch_adam") is False:
        ops.build(ops.adam(offloaded(options, "offload_optimizer")))
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in optimizer.param_groups]
    return {"model_parameters": groups}


def _for_evaluation(options: DeepSpeedStrategy, run: Run, model: nn.Module, tree: Tree) -> nn.Module:
    """Shard the parameters at stage 3; at the other stages there is nothing to shard without an optimizer."""
    if options.zero_stage == 3:
        tree = {key: value for key, value in tree.items() if key not in ("optimizer", "scheduler")}
        with _quiet():
            model = backend.initialize(model=model, config=tree)
    else:
        model = model.to(device=run.world.device, dtype=model_dtype(run.config))
    if run.config.precision != "fp32":
        defaults.results_in_fp32(model)
    return model


def _checkpoint_activations(model: Any, tree: Tree) -> None:
    """Have the model recompute its layers with DeepSpeed's function."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    from distcore import ConfigError

    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError("strategy_options.activation_checkpointing: the model does not support it")
    checkpointing.configure(None, deepspeed_config=tree)
    model.gradient_checkpointing_enable()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = checkpointing.checkpoint


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what DeepSpeed prints of itself while it builds an engine; what goes wrong is raised."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
