"""The options of the strategy, and the combinations that are refused: those that cannot work,
or would do nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from torch import nn

from distcore import ConfigError, RunConfig, StrategyError
from distcore_fsdp.units import RECOMPUTED_TWICE, Recomputed, Wrap, find_units

FSDP1_NAMES = {
    "full_shard": "full",
    "shard_grad_op": "grad",
    "hybrid_shard": "hybrid",
    "no_shard": "none",
}
"""Map FSDP1's names of sharding strategies to ours."""
ROUNDED = (
    "parameters are gathered in that of training, by param_dtype = 'precision'; leave out one of"
    " them"
)
"""Why an evaluation cannot have a precision of its own."""
IN_FP32 = "has no effect with precision = 'fp32'; use --precision bf16, or leave it out"
"""Why a dtype of ``precision`` changes nothing."""
ON_CPU = (
    "has no effect on a CPU, whose memory is the main memory; leave it out, or name an accelerator"
    " by --device"
)
"""Why nothing is offloaded."""
NO_UNITS = "has no effect on {}, in which nothing repeats: name its parts by strategy_options.wrap"
"""Why a model without units has nothing to recompute."""


def _from_fsdp1(name: object) -> object:
    return FSDP1_NAMES.get(name.lower(), name) if isinstance(name, str) else name


Sharding = Annotated[Literal["full", "grad", "hybrid", "none"], BeforeValidator(_from_fsdp1)]
Count = Annotated[int, Field(ge=0)]
Dtype = Literal["fp32", "precision"]


def check_dtype(name: str, value: str, config: RunConfig) -> None:
    """Raise ConfigError for a dtype that is asked to follow the precision, where that is fp32."""
    # Under an adapter the base may be kept in 16 bits, and is gathered in fp32 then.
    is_idle = config.precision == "fp32" and (name == "reduce_dtype" or config.lora.rank is None)
    if value == "precision" and is_idle:
        raise ConfigError(f"strategy_options.{name} = 'precision': {IN_FP32}")


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """How parameters, gradients and optimizer state are sharded, gathered and kept."""

    sharding: Sharding = "full"
    """``full``: parameters are freed after a block's forward and gathered again
    for its backward (ZeRO-3).
    ``grad``: parameters are kept until the end of backward (ZeRO-2). ``hybrid``:
    ``full`` inside groups of
    ``shard_size`` ranks, replicated over the groups. ``none``: replicated. FSDP1's
    names are accepted, too.
    """
    shard_size: Annotated[int, Field(ge=1)] | None = None
    """Ranks of a ``hybrid`` group, a divisor of the number of ranks; default: the
    ranks of this machine.
    """
    wrap: Wrap = "auto"
    """Modules that are gathered as units. ``auto``: the model's repeated blocks. One name of a
    class or of modules (``bert.pooler``, ``bert.encoder.layer.*``), or several. A number: every
    module with at least that many parameters.
    """
    param_dtype: Dtype = "fp32"
    """Dtype in which parameters are gathered; the master copy is always fp32. ``precision``: the
    dtype of ``--precision``. That halves the traffic, and also rounds embeddings and
    normalizations, which autocast leaves in fp32.
    """
    reduce_dtype: Dtype = "fp32"
    """Dtype in which gradients are summed over ranks. ``precision``: the dtype of ``--precision``,
    which halves the traffic and rounds gradients.
    """
    cpu_offload: bool = False
    """Keep the shards of parameters, gradients and optimizer state in main memory, and
    run the optimizer there.
    """
    activation_checkpointing: Recomputed = False
    """Recompute the activations of each unit in backward, instead of keeping them. A number n:
    of every n-th unit.
    ``products``: of each unit, but results of matrix products and attention are kept.
    """
    forward_prefetch: Count = 0
    """Units to gather ahead of the computing one in forward; 0: left to torch."""
    backward_prefetch: Count = 0
    """Units to gather ahead of the computing one in backward; 0: left to torch,
    which gathers one ahead.
    """

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError for options that do not fit the run or each other,
        or would do nothing.
        """
        self.check_evaluation(config)
        self._check_idle(config)

    def check_model(self, config: RunConfig, meta_model: nn.Module) -> None:
        """Raise StrategyError for a ``wrap`` without a module, or an option of units
        that the model lacks.
        """
        self._check_idle_units(meta_model)

    def check_evaluation(self, config: RunConfig) -> None:
        """Raise ConfigError for a ``shard_size`` that does not fit ``sharding`` or the ranks."""
        ranks = int(config.nproc)
        key = "strategy_options.shard_size"
        shard = self.shard_ranks(ranks)
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ConfigError(
                f"{key} = {self.shard_size}: is for sharding = 'hybrid', not {self.sharding!r}"
            )
        is_other_precision = config.eval_precision not in ("same", config.precision)
        if self.param_dtype == "precision" and is_other_precision:
            raise ConfigError(f"eval_precision = {config.eval_precision!r}: {ROUNDED}")
        if self.activation_checkpointing and config.gradient_checkpointing:
            raise ConfigError(RECOMPUTED_TWICE)
        if ranks % shard:
            sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
            possible = ", ".join(map(str, sizes))
            raise ConfigError(
                f"{key} = {shard}: must divide the {ranks} ranks (possible: {possible})"
            )

    def _check_idle(self, config: RunConfig) -> None:
        """Raise ConfigError for an option without effect.

        One rank is no reason: a config is for any number of them.
        """
        check_dtype("param_dtype", self.param_dtype, config)
        check_dtype("reduce_dtype", self.reduce_dtype, config)
        if self.cpu_offload and config.device == "cpu":
            raise ConfigError(f"strategy_options.cpu_offload = true: {ON_CPU}")
        ranks = int(config.nproc)
        if ranks == 1:
            return
        kept = "has no effect with sharding = {!r}, under which {}; leave one of them out".format
        if self.shard_ranks(ranks) == 1:
            for name in ("forward_prefetch", "backward_prefetch"):
                if value := getattr(self, name):
                    why = kept(self.sharding, "each rank has all parameters")
                    raise ConfigError(f"strategy_options.{name} = {value}: {why}")
        if self.backward_prefetch and self.sharding == "grad":
            why = kept("grad", "parameters are kept until the end of backward")
            raise ConfigError(
                f"strategy_options.backward_prefetch = {self.backward_prefetch}: {why}"
            )

    def _check_idle_units(self, model: nn.Module) -> None:
        """Raise StrategyError, one line, for an option of units that the model has too few of."""
        units, name = find_units(model, self.wrap), type(model).__name__
        if self.activation_checkpointing and not units:
            value = repr(self.activation_checkpointing).lower()
            raise StrategyError(
                f"strategy_options.activation_checkpointing = {value}: {NO_UNITS.format(name)}"
            )
        for option in ("forward_prefetch", "backward_prefetch"):
            if (value := getattr(self, option)) and len(units) < 2:
                raise StrategyError(
                    f"strategy_options.{option} = {value}: has no effect on {name}, which has fewer"
                    " than two units; leave it out, or name more by strategy_options.wrap"
                )

    def shard_ranks(self, ranks: int) -> int:
        """Return the number of ranks that share one copy of the parameters."""
        if self.sharding == "hybrid":
            return self.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        return 1 if self.sharding == "none" else ranks
