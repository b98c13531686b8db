"""``fsdp``: torch's fully_shard (FSDP2); parameters, gradients and optimizer state are spread over the ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from distcore import (
    Capabilities,
    ConfigError,
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    State,
    World,
    gather_rows,
    hookimpl,
    join_process_group,
    leave_process_group,
    sum_over_ranks,
)
from distcore_fsdp.blocks import Wrap, blocks, describe
from distcore_fsdp.memory import return_large_blocks
from distcore_fsdp.shards import load_state, save_state
from distcore_fsdp.weights import NotSliceable, Weights, find_weights, has_slices, materialise

log = logging.getLogger("distcore")
FSDP1 = {"full_shard": "full", "shard_grad_op": "grad", "hybrid_shard": "hybrid", "no_shard": "none"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING = nullcontext()


def _of_fsdp1(name: object) -> object:
    return FSDP1.get(name.lower(), name) if isinstance(name, str) else name


Sharding = Annotated[Literal["full", "grad", "hybrid", "none"], BeforeValidator(_of_fsdp1)]
Count = Annotated[int, Field(ge=0)]
Dtype = Literal["fp32", "precision"]


@dataclass(frozen=True, kw_only=True)
class FSDPStrategy:
    """Spread parameters, gradients and optimizer state over the ranks; gather each block when it is its turn."""

    shorthand: ClassVar = "sharding"

    sharding: Sharding = "full"
    """``full``: parameters are freed after a block's forward and gathered again for its backward (ZeRO-3).
    ``grad``: they are kept until backward is over (ZeRO-2). ``hybrid``: ``full`` inside groups of ``shard_size`` ranks,
    replicated over the groups. ``none``: replicated. FSDP1's names mean the same."""
    shard_size: Annotated[int, Field(ge=1)] | None = None
    """Ranks of a ``hybrid`` group, a divisor of the number of ranks; default: the ranks of this machine."""
    wrap: Wrap = "auto"
    """What is gathered as a unit. ``auto``: the model's repeated blocks. A class name or several. A number: every
    module with at least so many parameters."""
    param_dtype: Dtype = "fp32"
    """What parameters are gathered in; the master copy is always fp32. ``precision``: what ``--precision`` says, half
    the traffic, and embeddings and normalisations, which autocast leaves in fp32, are rounded too."""
    reduce_dtype: Dtype = "fp32"
    """What gradients are averaged over ranks in. ``precision``: half the traffic, gradients rounded."""
    cpu_offload: bool = False
    """Keep shards of parameters, gradients and optimizer state in main memory, and step there."""
    activation_checkpointing: bool = False
    """Recompute each unit's activations in backward instead of keeping them."""
    forward_prefetch: Count = 0
    """Units to gather ahead of the one that is computing, in forward; 0: torch's own order."""
    backward_prefetch: Count = 0
    """The same in backward; 0: torch's own, which is one ahead."""

    capabilities: ClassVar = Capabilities(
        spec_version=2,
        shards_parameters=True,
        limits=(
            "a model with random weights, or from files that are not safetensors, is built whole before it is sharded",
            "reduce_dtype: precision rounds gradients on the wire",
            "a parameter without dimensions cannot be sharded",
        ),
    )

    def check_config(self, config: RunConfig) -> None:
        ranks, key = int(config.nproc), "strategy_options.shard_size"
        shard = self._shard_size(ranks)
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ConfigError(f"{key} = {self.shard_size}: is for sharding = 'hybrid', not {self.sharding!r}")
        if ranks % shard:
            possible = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            raise ConfigError(f"{key} = {shard}: must divide the {ranks} ranks (possible: {possible})")

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        # With offload gradients lie in main memory, and so do the norms that ranks sum.
        world = join_process_group(config, rank_info, main_memory=self.cpu_offload)
        if self.cpu_offload or world.device.type == "cpu":
            return_large_blocks()
        return world

    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> nn.Module:
        if source.folder is None or not has_slices(source.folder):
            return source.build()
        skeleton = source.skeleton()
        try:
            weights = find_weights(skeleton, source.folder, config.seed)
        except NotSliceable as reason:
            log.info("fsdp: every rank builds the whole model: %s", reason)
            return source.build()
        return _remember(skeleton, weights)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        weights = _remembered(model)
        units = blocks(model, self.wrap)
        log.info("fsdp: %s", describe(model, units))
        mesh, policy, offload = self._mesh(run.world), self._policy(run.config), self._offload(run.world)
        for module in (*units.values(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, **self._keeps())
        if weights is not None:
            materialise(model, weights, run.world.device, self.cpu_offload)
        if self.activation_checkpointing and not run.config.gradient_checkpointing:
            _recompute(units.values())
        in_order = [cast(FSDPModule, module) for module in reversed(units.values())]
        _prefetch(in_order, self.forward_prefetch, self.backward_prefetch)
        return PreparedModel(model=model, optimizer=make_optimizer(model) if make_optimizer else None)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        if run.accumulation > 1:
            root = cast(FSDPModule, run.model)
            root.set_requires_gradient_sync(last)
            if self._keeps():  # gathered once a step, not once a micro-batch
                root.set_reshard_after_backward(last)
        return _NOTHING

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        return save_state(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        return load_state(run, state)

    @hookimpl
    def teardown(self, world: World) -> bool:
        return leave_process_group(world)

    def _mesh(self, world: World) -> DeviceMesh:
        kind, shard = world.device.type, self._shard_size(world.size)
        if self.sharding in ("full", "grad"):
            return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
        return init_device_mesh(kind, (world.size // shard, shard), mesh_dim_names=("replicate", "shard"))

    def _shard_size(self, ranks: int) -> int:
        """Ranks that share one copy of the parameters."""
        if self.sharding == "hybrid":
            return self.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        return 1 if self.sharding == "none" else ranks

    def _keeps(self) -> dict[str, Any]:
        """Options of ``fully_shard``: left to itself it frees each block after forward, but never the root."""
        return {"reshard_after_forward": False} if self.sharding in ("grad", "none") else {}

    def _policy(self, config: RunConfig) -> MixedPrecisionPolicy:
        """Blocks get their inputs as they are: the core's autocast alone decides what is computed in half precision."""
        dtypes = {"fp32": torch.float32, "precision": DTYPES[config.precision]}
        return MixedPrecisionPolicy(
            param_dtype=dtypes[self.param_dtype], reduce_dtype=dtypes[self.reduce_dtype], cast_forward_inputs=False
        )

    def _offload(self, world: World) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if self.cpu_offload else OffloadPolicy()


def _remember(model: nn.Module, weights: Weights) -> nn.Module:
    """Take the weights' places along from ``build_model`` to ``wrap_model``: the model is all that passes between."""
    vars(model)["distcore_weights"] = weights
    return model


def _remembered(model: nn.Module) -> Weights | None:
    weights: Weights | None = vars(model).pop("distcore_weights", None)
    return weights


def _recompute(units: Iterable[nn.Module]) -> None:
    """Replace each forward, inside the hooks that gather and free: parameter names stay what they are."""
    for unit in units:
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def _prefetch(units: Sequence[FSDPModule], forward: int, backward: int) -> None:
    """Tell every unit, in the order in which they compute, which ones to gather while it computes."""
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + forward]))
        if backward:
            unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - backward) : index])))
