"""The options of the strategy: sizes of the groups of ranks, and the
combinations that are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from distcore import ConfigError, RunConfig, StrategyError
from distcore.model import repeated_classes
from distcore_fsdp import options as fsdp_options
from distcore_fsdp import units
from distcore_mesh.context_parallel import Exchange, check_sequences
from distcore_mesh.experts import check_experts, find_experts
from distcore_mesh.loss_parallel import check_head
from distcore_mesh.pipeline_split import check_stages
from distcore_mesh.sequence_parallel import check_tokens
from distcore_mesh.tensor_parallel import styles_for
from distcore_mesh.tp_plans import plan_for, read_plan

Dtype = Literal["fp32", "precision"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The split of layers, sequences and blocks over groups of ranks, and
    their sharding and replication.
    """

    tp: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each layer (tensor parallelism). They train on the same
    rows: one data shard.
    """
    sequence_parallel: bool = False
    """Split norms, residuals and dropout of the blocks by tokens, instead of computing them on
    every rank of ``tp``.
    """
    loss_parallel: bool = False
    """In training, compute the loss from the split logits of a head that is split by
    vocabulary, without a gather.
    """
    replicate: Annotated[int, Field(ge=1)] | None = None
    """Groups of ranks that hold the same parameters; default: the ranks that the other
    sizes leave, or 1.
    """
    shard: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2);
    default: all remaining ranks.
    """
    cp: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each sequence in the blocks of a decoder (context parallelism). They are
    one data shard, too.
    """
    cp_exchange: Exchange = "auto"
    """What ranks of ``cp`` exchange in attention. ``heads``: tokens for heads, under a mask.
    ``blocks``: the same, document by document without a mask. ``keys``: keys and values go around.
    ``auto``: ``keys`` if C does not divide the heads, else ``blocks`` for packed rows and ``heads``
    for others.
    """
    ep: Annotated[int, Field(ge=1)] = 1
    """Ranks that share the experts of each layer of a mixture (expert parallelism). They have rows
    of their own: ``ep`` divides ``shard``.
    """
    pp: Annotated[int, Field(ge=1)] = 1
    """Stages of a pipeline. Each computes its share of the model's blocks, and sends its hidden
    state to the next.
    """
    pp_schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """Order of a rank's passes. ``1f1b``: forward and backward alternate. ``gpipe``:
    all forward passes first.
    ``interleaved``: forward and backward alternate, through several stages on each rank.
    """
    pp_chunks: Annotated[int, Field(ge=2)] | None = None
    """Stages on each rank with ``interleaved``; default: 2."""
    param_dtype: Dtype = "fp32"
    """Dtype in which shards are gathered; the master copy is always fp32. ``precision``: the dtype
    of ``--precision``, which also rounds embeddings and normalizations.
    """
    reduce_dtype: Dtype = "fp32"
    """Dtype in which gradients are averaged over data shards. ``precision``:
    the dtype of ``--precision``.
    """
    activation_checkpointing: units.Recomputed = False
    """Recompute the activations of each block in backward, instead of keeping them. A number
    n: of every n-th block.
    ``products``: of each block, but results of matrix products and attention are kept; for tp = 1.
    """
    plan: str | None = None
    """A file with a line ``NAME: STYLE`` for each layer that is split. Default: the plan for the
    model type, or the model's own.
    """

    @property
    def chunks(self) -> int:
        """Number of pipeline stages on each rank."""
        return (self.pp_chunks or 2) if self.pp_schedule == "interleaved" else 1

    def dtype_of(self, config: RunConfig, option: Dtype) -> torch.dtype:
        """Return the torch dtype of ``param_dtype`` or ``reduce_dtype``."""
        return DTYPES[config.precision] if option == "precision" else torch.float32

    def gathered_in(self, config: RunConfig) -> torch.dtype | None:
        """Return the dtype in which shards are gathered; ``None``: each in its own, which is 16
        bits in some bases.
        """
        return None if self.param_dtype == "fp32" else self.dtype_of(config, self.param_dtype)

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError for options that do not fit the run or each other, or do nothing."""
        self.check_evaluation(config)
        self._check_dtypes(config)

    def _check_dtypes(self, config: RunConfig) -> None:
        """Raise ConfigError for a dtype of shards or of summed gradients where there are none."""
        in_one_shard = self.tp * self.cp * self.pp
        is_alone = int(config.nproc) == in_one_shard
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            fsdp_options.check_dtype(name, value, config)
            if value == "precision" and is_alone and in_one_shard > 1:
                why = "nothing is sharded or summed by FSDP2; leave it out, or start more ranks"
                raise ConfigError(
                    f"strategy_options.{name} = 'precision': has no effect on {in_one_shard} ranks:"
                    f" {why}"
                )

    def check_evaluation(self, config: RunConfig) -> None:
        """Raise ConfigError for sizes that do not make ``nproc``, or options that do not combine.

        A plan that cannot be read is refused, too.
        """
        self.sizes(int(config.nproc))
        is_other_precision = config.eval_precision not in ("same", config.precision)
        if self.param_dtype == "precision" and is_other_precision:
            why = (
                "shards are gathered in that of training, by param_dtype = 'precision'; leave out"
                " one of them"
            )
            raise ConfigError(f"eval_precision = {config.eval_precision!r}: {why}")
        if self.plan is not None:
            read_plan(self.plan)
            if self.tp == 1:
                raise ConfigError(
                    f"strategy_options.plan = {self.plan!r}: is for tp greater than 1"
                )
        if self.pp > 1 and self.cp > 1:
            raise ConfigError(
                f"strategy_options.pp = {self.pp}: not with cp = {self.cp}; choose one of them"
            )
        if (self.pp > 1 or self.sequence_parallel) and config.lora.rank is not None:
            key = "pp = 1" if self.pp > 1 else "sequence_parallel = false"
            raise ConfigError(
                f"lora.rank = {config.lora.rank}: strategy 'mesh' trains adapters with {key} only"
            )
        self._check_experts(config)
        if self.pp_schedule != "1f1b" and self.pp == 1:
            raise ConfigError(
                f"strategy_options.pp_schedule = {self.pp_schedule!r}: needs pp greater than 1"
            )
        if self.activation_checkpointing and config.gradient_checkpointing:
            raise ConfigError(units.RECOMPUTED_TWICE)
        if self.pp_chunks is not None and self.pp_schedule != "interleaved":
            raise ConfigError(
                f"strategy_options.pp_chunks = {self.pp_chunks}: is for pp_schedule = 'interleaved'"
            )
        if self.sequence_parallel and (self.tp == 1 or self.cp > 1 or self.pp > 1):
            why = f"not with {'cp' if self.cp > 1 else 'pp'}"
            if self.tp == 1:
                why = "needs tp greater than 1"
            raise ConfigError(f"strategy_options.sequence_parallel = true: {why}")
        if self.loss_parallel and self.tp == 1:
            raise ConfigError("strategy_options.loss_parallel = true: needs tp greater than 1")
        if self.tp > 1 and self.activation_checkpointing == "products":
            why = "ranks sum products in place; use true, or a number"
            raise ConfigError(
                f"strategy_options.activation_checkpointing = 'products': not with tp = {self.tp}:"
                f" {why}"
            )
        if self.cp_exchange != "auto" and self.cp == 1:
            raise ConfigError(
                f"strategy_options.cp_exchange = {self.cp_exchange!r}: needs cp greater than 1"
            )
        if self.cp > 1 and self.activation_checkpointing:
            remedy = "use --set gradient_checkpointing=true"
            raise ConfigError(
                f"strategy_options.activation_checkpointing: not with cp = {self.cp}; {remedy}"
            )

    def _check_experts(self, config: RunConfig) -> None:
        """Raise ConfigError unless ``ep`` divides the ranks that shard."""
        _, _, shard, _, _ = self.sizes(int(config.nproc))
        if shard % self.ep:
            divisors = [str(size) for size in range(1, shard + 1) if shard % size == 0]
            raise ConfigError(
                f"strategy_options.ep = {self.ep}: must divide shard = {shard}"
                f" (possible: {', '.join(divisors)})"
            )

    def check_model(self, config: RunConfig, meta_model: nn.Module) -> None:
        """Raise StrategyError for a model without a plan, or with sizes that do not divide.

        Sizes are those of layers, and the numbers of heads and blocks.
        """
        if self.tp > 1:
            styles = styles_for(meta_model, plan_for(meta_model, self.plan), self.tp)
            if self.sequence_parallel:
                check_tokens(meta_model, styles)
            if self.loss_parallel:
                check_head(meta_model, styles)
        if self.ep > 1:
            check_experts(meta_model, f"ep = {self.ep}", self.ep * self.tp)
        elif self.tp > 1 and find_experts(meta_model):
            check_experts(meta_model, f"tp = {self.tp}", self.tp)
        if self.cp > 1:
            check_sequences(meta_model, self.cp, self.tp, self.cp_exchange)
        if self.pp > 1:
            check_stages(meta_model, self.pp, self.chunks)
        if self.activation_checkpointing and not repeated_classes(meta_model):
            value = repr(self.activation_checkpointing).lower()
            why = (
                f"has no effect on {type(meta_model).__name__}, in which nothing repeats; leave"
                " it out"
            )
            raise StrategyError(f"strategy_options.activation_checkpointing = {value}: {why}")

    def sizes(self, ranks: int) -> tuple[int, int, int, int, int]:
        """Return ``pp``, ``replicate``, ``shard``, ``cp``, ``tp``.

        Raises ConfigError if they do not make ``ranks``.
        """
        sizes: dict[str, int] = {}
        for name in ("tp", "cp", "pp"):
            size = getattr(self, name)
            # 1 is the default, which an error need not name.
            if size > 1:
                sizes[name] = size
        for name in ("replicate", "shard"):
            size = getattr(self, name)
            if size is not None:
                sizes[name] = size
        unit = math.prod(sizes.values())
        left, over = divmod(ranks, unit)
        is_fixed = self.replicate is not None and self.shard is not None
        if over or (left > 1 and is_fixed):
            product = " * ".join(f"{name} = {size}" for name, size in sizes.items())
            possible = f"{unit} ranks would" if is_fixed else f"a multiple of {unit} would"
            raise ConfigError(
                f"strategy_options: {product} does not make nproc = {ranks}: {possible}"
            )
        if self.shard is None:
            return self.pp, self.replicate or 1, left, self.cp, self.tp
        return self.pp, self.replicate or left, self.shard, self.cp, self.tp
