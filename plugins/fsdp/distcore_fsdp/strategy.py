"""``fsdp``: torch's ``fully_shard`` (FSDP2), which shards parameters, gradients and optimizer
state over the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from distcore import (
    BuiltModel,
    Capabilities,
    Memory,
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    WeightStream,
    World,
    defaults,
    dtensors,
    hookimpl,
    join_process_group,
)
from distcore.distributed import RepeatedCalls
from distcore.model import build_in_parts, gradient_hooks, return_large_blocks
from distcore_fsdp.gradient_hooks import carry_gradient_hooks
from distcore_fsdp.memory import ShardingSettings, sharded_memory
from distcore_fsdp.options import FSDPOptions
from distcore_fsdp.units import checkpoint_activations, describe_units, find_units

log = logging.getLogger("distcore")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_CONTEXT = nullcontext()


@dataclass(frozen=True)
class FSDPState:
    """The strategy's state for one model."""

    sync: dtensors.GradientSync
    """Tells units when to send gradients."""
    calls: RepeatedCalls
    """The calls of the units in the forward pass that is under way."""


@dataclass(frozen=True, kw_only=True)
class FSDPStrategy(FSDPOptions):
    """Shard parameters, gradients and optimizer state over the ranks; gather each block
    just before it computes.
    """

    shorthand: ClassVar = "sharding"
    tunes: ClassVar[tuple[dict[str, Any], ...]] = (
        {"sharding": "grad"},
        {"sharding": "full"},
        {"sharding": "full", "forward_prefetch": 1, "backward_prefetch": 2},
        {"sharding": "full", "cpu_offload": True},
    )

    @property
    def capabilities(self) -> Capabilities:
        """The declaration. With replicas, the surviving ranks can save alone."""
        return Capabilities(
            spec_version=3,
            gradients="sum",
            optimizers=frozenset(
                {"adamw", "adamw8bit", "muon"}
            ),  # adamw8bit needs whole rows only, and muon gathers its matrices
            other_optimizers="elementwise",
            shards_parameters=True,
            inner_gradients="first",
            lacks=frozenset(
                {"sparse gradients", "complex parameters", "parameters without elements"}
            ),
            phases=True,
            own_steps=True,
            ema=True,
            saves_alone=self.sharding in ("hybrid", "none"),
            compiles=frozenset({"regions"}),  # hooks between the blocks gather weights
            # measured on a CPU with bert-mini, two ranks: every pass gathers the parameters
            forward_cost=3.5,
            exact=self._exact(),
            limits=(
                "a rank builds a model whole if its weights can be neither read nor drawn in parts",
                "reduce_dtype=precision rounds gradients",
                "a parameter without dimensions cannot be sharded",
            ),
        )

    def _exact(self) -> frozenset[str]:
        """Return the precisions that keep the bits of ``--exact``: none with 16-bit transfers.

        They need gradients in other dtypes than the parameters', which older versions of torch
        lack.
        """
        in_full = self.param_dtype == self.reduce_dtype == "fp32"
        return frozenset({"fp32", "bf16"} if in_full and hasattr(Tensor, "grad_dtype") else ())

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory of the shards.

        Buffers hold the gathered parameters of the root and the largest unit.
        """
        policy, shards = self._policy(config), self.shard_ranks(ranks)
        settings = ShardingSettings(
            shards=shards,
            replicas=ranks // shards,
            frees=not self._reshard_options(),
            offloads=self.cpu_offload,
            gathered_in=policy.param_dtype,
            reduced_in=policy.reduce_dtype or torch.float32,
        )
        return sharded_memory(
            meta_model, find_units(meta_model, self.wrap), make_optimizer, settings
        )

    def traced(self) -> object:
        """Return itself: it communicates by torch's collectives alone, which a trace can follow."""
        return self

    def gathering_modules(self, run: Run) -> dict[str, nn.Module]:
        """Return the units: a call gathers the weights of one."""
        return dtensors.sharded_units(run.module)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group."""
        # With offload, ranks sum the norms of gradients in main memory, which needs a CPU backend.
        world = join_process_group(config, rank_info, main_memory=self.cpu_offload)
        if self.cpu_offload or world.device.type == "cpu":
            return_large_blocks()
        return world

    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> BuiltModel:
        """Return the model on the meta device if it can be read or drawn shard by shard,
        else a whole one.
        """
        return build_in_parts(source, "fsdp", source.replay)

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Shard the units, then the root. Load the shards if the model has no storage yet."""
        values: WeightStream | None = run.strategy_state
        units, hooks = find_units(model, self.wrap), gradient_hooks(model)
        log.info("fsdp: %s", describe_units(model, units))
        mesh, policy, offload = (
            self._mesh(run.world),
            self._policy(run.config),
            self._offload(run.world),
        )
        options = self._reshard_options() | {
            "mesh": mesh,
            "mp_policy": policy,
            "offload_policy": offload,
        }
        dtensors.make_contiguous(model)
        in_order = [fully_shard(module, **options) for module in units.values()][::-1]
        root = fully_shard(model, **options)
        dtensors.refuse_mixed_dtypes(model)
        dtensors.sum_gradients(model)
        # transformers' generate() calls parts of the model, which must be gathered
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        if values is not None:
            self._allocate(model, run.world.device)
            dtensors.replay(model, values)
        carry_gradient_hooks(model, hooks)
        if self.activation_checkpointing and not run.config.gradient_checkpointing:
            checkpoint_activations(units.values(), self.activation_checkpointing)
        _set_prefetch(in_order, self.forward_prefetch, self.backward_prefetch)
        optimizer = make_optimizer(model) if make_optimizer else None
        state = FSDPState(
            dtensors.GradientSync(root), RepeatedCalls(model, register_fsdp_forward_method)
        )
        return PreparedModel(model=model, optimizer=optimizer, state=state)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Send gradients after the last micro-batch only."""
        if run.accumulation > 1:
            state: FSDPState = run.strategy_state
            state.sync.tell(last)
            state.calls.begin(last)
            if self._reshard_options():  # gather parameters once per step, not once per micro-batch
                state.sync.model.set_reshard_after_backward(last)
        return _NO_CONTEXT

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Run the default, after which no gradient is left unsent."""
        share = defaults.backward(run, loss)
        state: FSDPState = run.strategy_state
        state.calls.finish()
        return share

    def _allocate(self, model: nn.Module, device: torch.device) -> None:
        """Give the shards memory, which may be main memory, and buffers that of the device,
        where they are used.
        """
        dtensors.allocate(model, torch.device("cpu") if self.cpu_offload else device)
        for name, buffer in list(model.named_buffers()):
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, buffer.to(device))

    def _mesh(self, world: World) -> DeviceMesh:
        kind, shard = world.device.type, self.shard_ranks(world.size)
        if self.sharding in ("full", "grad"):
            return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
        # For "none" the groups have one rank: all ranks are replicas.
        return init_device_mesh(
            kind, (world.size // shard, shard), mesh_dim_names=("replicate", "shard")
        )

    def _reshard_options(self) -> dict[str, Any]:
        """Return options of ``fully_shard``, which by default frees each block after forward,
        but not the root.
        """
        return {"reshard_after_forward": False} if self.sharding in ("grad", "none") else {}

    def _policy(self, config: RunConfig) -> MixedPrecisionPolicy:
        """Return the dtypes.

        Inputs are not cast, because the core's autocast decides what runs in half precision.
        """
        half = DTYPES[config.precision]
        # as it is: a frozen base may be in 16 bits
        gathered = None if self.param_dtype == "fp32" else half
        # None where gradients are fp32 already: with a dtype torch expects gradients in units that
        # no pass used, too.
        reduced = (
            half
            if self.reduce_dtype == "precision"
            else None
            if gathered is None
            else torch.float32
        )
        return MixedPrecisionPolicy(
            param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False
        )

    def _offload(self, world: World) -> OffloadPolicy:
        return (
            CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
            if self.cpu_offload
            else OffloadPolicy()
        )


def _set_prefetch(units: Sequence[FSDPModule], forward: int, backward: int) -> None:
    """Have each unit gather the next ones while it computes. ``units`` are in forward order."""
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + forward]))
        if backward:
            unit.set_modules_to_backward_prefetch(
                list(reversed(units[max(0, index - backward) : index]))
            )
