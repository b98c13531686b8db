"""Refuse options that would do nothing in a run, before its ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from distcore import ConfigError, RunConfig, StrategyError

if TYPE_CHECKING:
    from distcore_fsdp.strategy import FSDPStrategy

IN_FP32 = "has no effect with precision = 'fp32'; use --precision bf16, or leave it out"
"""Why a dtype of ``precision`` changes nothing."""
ON_CPU = "has no effect on a CPU, whose memory is the main memory; leave it out, or plan with --device cuda"
"""Why nothing is offloaded."""
NO_UNITS = "has no effect on {}, in which nothing repeats: name its parts by strategy_options.wrap"
"""Why a model without units has nothing to recompute."""


def check_dtype(name: str, value: str, config: RunConfig) -> None:
    """Raise ConfigError for a dtype that is asked to follow the precision, where that is fp32."""
    if value == "precision" and config.precision == "fp32":
        raise ConfigError(f"strategy_options.{name} = 'precision': {IN_FP32}")


def check_idle(strategy: FSDPStrategy, config: RunConfig, shards: int) -> None:
    """Raise ConfigError, one line, for an option without effect. ``shards``: the ranks of one copy of the model.

    A single rank is no reason: a config is the same for any number of ranks.
    """
    check_dtype("param_dtype", strategy.param_dtype, config)
    check_dtype("reduce_dtype", strategy.reduce_dtype, config)
    if strategy.cpu_offload and config.device == "cpu":
        raise ConfigError(f"strategy_options.cpu_offload = true: {ON_CPU}")
    if int(config.nproc) == 1:
        return
    kept = "has no effect with sharding = {!r}, under which {}; leave one of them out".format
    if shards == 1:
        for name in ("forward_prefetch", "backward_prefetch"):
            if value := getattr(strategy, name):
                why = kept(strategy.sharding, "each rank has all parameters")
                raise ConfigError(f"strategy_options.{name} = {value}: {why}")
    if strategy.backward_prefetch and strategy.sharding == "grad":
        why = kept("grad", "parameters are kept until the end of backward")
        raise ConfigError(f"strategy_options.backward_prefetch = {strategy.backward_prefetch}: {why}")


def check_idle_units(strategy: FSDPStrategy, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise StrategyError, one line, for an option of units that the model has too few of."""
    name = type(model).__name__
    if strategy.activation_checkpointing and not units:
        value = repr(strategy.activation_checkpointing).lower()
        raise StrategyError(f"strategy_options.activation_checkpointing = {value}: {NO_UNITS.format(name)}")
    for option in ("forward_prefetch", "backward_prefetch"):
        if (value := getattr(strategy, option)) and len(units) < 2:
            raise StrategyError(
                f"strategy_options.{option} = {value}: has no effect on {name}, which has fewer than two units; leave "
                "it out, or name more by strategy_options.wrap"
            )
