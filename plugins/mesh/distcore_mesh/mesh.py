"""``mesh``: layers, sequences and blocks split over groups of ranks; sharded and replicated over the groups (FSDP2)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from distcore import (
    BuiltModel,
    Capabilities,
    Clip,
    Memory,
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    State,
    StepResult,
    StrategyError,
    Values,
    World,
    build_in_parts,
    defaults,
    dtensors,
    hookimpl,
    join_process_group,
    repeated_classes,
    return_large_blocks,
)
from distcore_fsdp import units as fsdp_units
from distcore_mesh.clipping import clip_gradients
from distcore_mesh.cuts import cut_into_stages, of_stage
from distcore_mesh.group import Group
from distcore_mesh.layers import split_layers
from distcore_mesh.meshes import mesh_of
from distcore_mesh.options import MeshOptions
from distcore_mesh.pipeline import train_step
from distcore_mesh.planned import planned_memory
from distcore_mesh.plans import plan_for
from distcore_mesh.sequences import Sequences, split_sequences
from distcore_mesh.splits import Layout, Split
from distcore_mesh.stages import Stages, run_stages, stages_of
from distcore_mesh.state import MeshState

log = logging.getLogger("distcore")
_NO_CONTEXT = nullcontext()


@dataclass(frozen=True, kw_only=True)
class MeshStrategy(MeshOptions):
    """Split layers, sequences and blocks over groups of ranks; shard over some groups, replicate over others."""

    tunes: ClassVar[tuple[dict[str, Any], ...]] = ({"tp": 2},)

    def __post_init__(self) -> None:
        if self.pp > 1:  # else the strategy has no such hook, so that the loop's own passes run
            object.__setattr__(self, "train_step", train_step)

    @property
    def capabilities(self) -> Capabilities:
        """What the strategy declares; the ranks of a data shard depend on ``tp``, ``cp`` and ``pp``."""
        return Capabilities(
            spec_version=3,
            precisions=frozenset({"fp32", "bf16"}),
            other_optimizers="elementwise",
            ranks_per_shard=self.tp * self.cp * self.pp,
            shards_parameters=True,
            ema=True,
            why_not_compiled="exchanges activations inside layers",
            forward_cost=3.5,  # taken over from FSDP2 alone
            limits=(
                "a pretrained model, or one whose random weights cannot be replayed, is built whole on every rank",
                "layers split by tp need a plan; adapters of LoRA are trained with tp = 1 only",
                "dropout of heads, hidden units and tokens that are split draws the same mask on each rank of a group",
                "cp is for decoders of a few model types; with cp or pp a model cannot generate text",
                "pp is for models with one stack of blocks and without tied weights",
            ),
            exempt={"tied-parameters": "two stages of a pipeline cannot share a weight"} if self.pp > 1 else {},
        )

    def plan_memory(
        self, config: RunConfig, skeleton: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the parts of layers, the shards and the stage of the rank that holds most."""
        return planned_memory(self, config, skeleton, ranks, make_optimizer)

    def traced(self) -> object:
        """Return itself: torch's collectives are all that it sends. Raises StrategyError for what is not traced."""
        if self.loss_parallel:
            raise StrategyError("strategy_options.loss_parallel: split logits are not traced; plan without it")
        if self.pp > 1:
            raise StrategyError(f"strategy_options.pp = {self.pp}: a pipeline is not traced; plan without pp")
        return self

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group; ranks that share layers, sequences or blocks are a data shard.

        Ranks of a stage follow each other, and in a stage those that share layers or sequences. The last stage speaks.
        """
        world = join_process_group(config, rank_info)
        if world.device.type == "cpu":
            return_large_blocks()
        stage, in_stage = divmod(world.rank, world.size // self.pp)
        shard, number = divmod(in_stage, self.tp * self.cp)
        shards = world.size // (self.tp * self.cp * self.pp)
        return replace(world, shard=shard, shards=shards, speaks=number == 0 and stage == self.pp - 1)

    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> BuiltModel:
        """Return the model on the meta device if its random weights can be drawn one by one, else a whole one."""
        return build_in_parts(source, "mesh", source.replayed)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        """Split the layers that the plan names, then shard what each rank holds."""
        values: Values | None = run.strategy_state
        mesh = mesh_of(run.world.device.type, self.sizes(run.world.size))
        layers, sequences = _group(mesh["tp"]), _group(mesh["cp"])
        splits: dict[str, Split] = {}
        spread: Sequences | None = None
        stages: Stages | None = None
        if self.tp > 1:
            splits, spread = split_layers(
                model, plan_for(model, self.plan), layers, self.sequence_parallel, self.loss_parallel
            )
        layout = Layout(splits, layers.rank, layers.size, replica=sequences.rank > 0)
        kinds = tuple(repeated_classes(model))  # of the whole model: a stage may have one block
        if self.pp > 1:
            stages = stages_of(mesh, self.pp_schedule, self.chunks)
            make_optimizer = make_optimizer and partial(of_stage, make_optimizer(model), dict(model.named_parameters()))
            mine = cut_into_stages(model, stages, self.dtype_of(run.config, self.param_dtype), run.world.device)
            first = run.world.rank == stages.rank * (run.world.size // self.pp)
            layout = replace(layout, of_stage=mine, is_first_of_stage=first)
        if self.cp > 1:
            spread = split_sequences(model, sequences, self.tp)
        if values is None:
            model = model.to(run.world.device)
        units = fsdp_units.find_units(model, kinds)
        if run.world.shards > 1:
            self._shard(
                run, model, units, mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
            )
        if values is not None:
            dtensors.allocate(model, run.world.device)
            layout.replay(model, values)
        if self.activation_checkpointing and not run.config.gradient_checkpointing:
            fsdp_units.checkpoint_activations(units.values())
        if stages is not None:
            run_stages(model, stages)
        optimizer = make_optimizer(model) if make_optimizer else None
        return PreparedModel(model=model, optimizer=optimizer, state=MeshState(layout, spread, stages))

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Send gradients after the last micro-batch only."""
        if run.accumulation > 1 and isinstance(run.model, FSDPModule):
            run.model.set_requires_gradient_sync(last)
        return _NO_CONTEXT

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip the whole gradient, parts and replicas joined; step the optimizer."""
        assert run.optimizer is not None  # the loop only steps runs that train
        state: MeshState = run.strategy_state
        layout = state.layout
        gradients = {name: p.grad for name, p in run.module.named_parameters() if p.grad is not None}
        held = {name: dtensors.local_part(gradient)[0] for name, gradient in gradients.items()}
        if state.sequences is not None:
            state.sequences.sum_gradients(held)
        counted = {
            name
            for name, gradient in gradients.items()
            if not (layout.replica or dtensors.is_replica(gradient)) and (layout.rank == 0 or name in layout.splits)
        }
        norm = clip_gradients(held, clip, counted, run.world.device)
        defaults.step(run, Clip(norm=None, value=None))
        return StepResult(grad_norm=norm)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Return the parts of tensors that this rank holds; nothing is gathered."""
        dtensors.reshard(run.module)
        mine: MeshState = run.strategy_state
        return mine.layout.save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        """Read the parts of tensors that this rank holds."""
        dtensors.reshard(run.module)
        mine: MeshState = run.strategy_state
        return mine.layout.load(run, state)

    def _shard(self, run: Run, model: nn.Module, units: dict[str, nn.Module], mesh: DeviceMesh) -> None:
        log.info("mesh: %s", fsdp_units.describe_units(model, units))
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype_of(run.config, self.param_dtype),
            reduce_dtype=self.dtype_of(run.config, self.reduce_dtype),
            cast_forward_inputs=False,
        )
        for module in (*units.values(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if hasattr(model, "generate"):  # of transformers; it calls parts of the model, whose weights must be there
            register_fsdp_forward_method(model, "generate")


def _group(mesh: DeviceMesh) -> Group:
    return Group(mesh.get_group(), mesh.get_local_rank(), mesh.size())
