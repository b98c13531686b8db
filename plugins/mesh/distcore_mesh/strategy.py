"""``mesh``: layers, sequences and blocks split over groups of ranks; sharded and replicated
over the groups (FSDP2).
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

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
    WeightStream,
    World,
    defaults,
    dtensors,
    hookimpl,
    join_process_group,
)
from distcore.distributed import RepeatedCalls
from distcore.model import build_in_parts, repeated_classes, return_large_blocks
from distcore_fsdp import units as fsdp_units
from distcore_mesh.clipping import clip_gradients
from distcore_mesh.context_parallel import SplitSequences, split_sequences
from distcore_mesh.expert_parallel import split_experts
from distcore_mesh.experts import find_experts
from distcore_mesh.memory import mesh_memory
from distcore_mesh.options import MeshOptions
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.pipeline import train_step
from distcore_mesh.pipeline_split import keep_stage_parameters, split_into_stages
from distcore_mesh.process_groups import make_expert_mesh, make_mesh
from distcore_mesh.stages import Stages, install_stages, make_stages
from distcore_mesh.state import MeshState
from distcore_mesh.tensor_layout import TensorLayout, TensorSplit
from distcore_mesh.tensor_parallel import split_layers
from distcore_mesh.tp_plans import plan_for

log = logging.getLogger("distcore")
_NO_CONTEXT = nullcontext()
OF_STAGES = {
    "tied-parameters": "two stages of a pipeline cannot share a weight",
    "recomputed-statistics": "running statistics of a block of one stage are unknown to the others",
}
"""Cases that cannot hold with a pipeline."""


@dataclass(frozen=True, kw_only=True)
class MeshStrategy(MeshOptions):
    """Split layers, sequences and blocks over groups of ranks; shard over some
    groups, replicate over others.
    """

    tunes: ClassVar[tuple[dict[str, Any], ...]] = ({"tp": 2},)

    def __post_init__(self) -> None:
        if self.pp > 1:  # without this hook the loop runs its own passes
            object.__setattr__(self, "train_step", train_step)

    @property
    def capabilities(self) -> Capabilities:
        """The declaration for these options: the ranks of a data shard depend on
        ``tp``, ``cp`` and ``pp``.
        """
        has_replicas = self.shard is not None or (self.replicate or 1) > 1
        return Capabilities(
            spec_version=3,
            gradients="sum",
            precisions=frozenset({"fp32", "bf16"}),
            other_optimizers="elementwise",
            ranks_per_shard=self.tp * self.cp * self.pp,
            shards_parameters=True,
            inner_gradients="first",
            lacks=frozenset(
                {"sparse gradients", "complex parameters", "parameters without elements"}
            ),
            calls_any_time=self.pp == 1,
            phases=self.pp == 1,
            why_not_phases="each stage of a pipeline expects gradients of all its parameters",
            row_masks=self.pp == 1,
            saves_alone=self.pp == 1 and has_replicas,
            own_steps=self.tp * self.cp * self.pp * self.ep == 1,
            ema=True,
            why_not_compiled="exchanges activations inside layers",
            forward_cost=3.5,  # as measured for fsdp
            limits=(
                "a rank builds a model whole if its weights can be neither read nor drawn in parts",
                (
                    "tp needs a plan of the layers to split; LoRA needs pp = 1, and no"
                    " sequence_parallel"
                ),
                (
                    "with pp, or dropout_masks=rank, the ranks of a group draw the same dropout"
                    " masks for their parts"
                ),
                (
                    "cp supports decoders of a few model types; with cp or pp a model cannot"
                    " generate text"
                ),
                "pp supports models with one stack of blocks and without tied weights",
                "a mixture of experts trains without cp; shared experts have no adapter of LoRA",
            ),
            exempt=OF_STAGES if self.pp > 1 else {},
        )

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory of the rank that holds most."""
        return mesh_memory(self, config, meta_model, ranks, make_optimizer)

    def traced(self) -> object:
        """Return itself: a trace can follow torch's collectives.

        Raises StrategyError for options without a trace.
        """
        if self.loss_parallel:
            raise StrategyError(
                "strategy_options.loss_parallel: split logits are not traced; plan without it"
            )
        if self.pp > 1:
            raise StrategyError(
                f"strategy_options.pp = {self.pp}: a pipeline is not traced; plan without pp"
            )
        return self

    def gathering_modules(self, run: Run) -> dict[str, nn.Module]:
        """Return the units of ``shard``, unless the ranks of a pipeline each have their own."""
        return dtensors.sharded_units(run.module) if self.pp == 1 else {}

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group.

        The ranks that share layers, sequences or blocks are a data shard.

        The ranks of a stage are consecutive and, within a stage, those that share layers or
        sequences. The first such rank of the last stage, which computes the loss, leads the data
        shard.
        """
        world = join_process_group(config, rank_info)
        if world.device.type == "cpu":
            return_large_blocks()
        stage, in_stage = divmod(world.rank, world.size // self.pp)
        shard, number = divmod(in_stage, self.tp * self.cp)
        shards = world.size // (self.tp * self.cp * self.pp)
        return replace(
            world, shard=shard, shards=shards, is_shard_leader=number == 0 and stage == self.pp - 1
        )

    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> BuiltModel:
        """Return the model on the meta device if its weights can be read or drawn one by one,
        else a whole model.
        """
        return build_in_parts(source, "mesh", source.replay)

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Split the layers that the plan names, then the sequences and the blocks, and
        shard each rank's part.
        """
        values: WeightStream | None = run.strategy_state
        mesh = make_mesh(run.world.device.type, self.sizes(run.world.size))
        layers, sequences = _group(mesh["tp"]), _group(mesh["cp"])
        splits: dict[str, TensorSplit] = {}
        sequence_split: SplitSequences | None = None
        stages: Stages | None = None
        if self.tp > 1:
            splits, sequence_split = split_layers(
                model,
                plan_for(model, self.plan),
                layers,
                self.sequence_parallel,
                self.loss_parallel,
            )
        layout = TensorLayout(splits, layers.rank, layers.size, replica=sequences.rank > 0)
        expert_mesh = self._expert_mesh(run)
        if self.ep * self.tp > 1 and find_experts(model):
            owners = None if expert_mesh is None else _group(expert_mesh["ep"])
            layout = layout.with_experts(*split_experts(model, owners, layers))
        # of the whole model, because a stage may have only one block
        block_classes = tuple(repeated_classes(model))
        if self.pp > 1:
            stages = make_stages(mesh, self.pp_schedule, self.chunks)
            make_optimizer = make_optimizer and partial(
                keep_stage_parameters, make_optimizer(model), dict(model.named_parameters())
            )
            mine = split_into_stages(
                model, stages, self.dtype_of(run.config, self.param_dtype), run.world.device
            )
            first = run.world.rank == stages.rank * (run.world.size // self.pp)
            layout = replace(layout, of_stage=mine, is_first_of_stage=first)
        if self.cp > 1:
            sequence_split = split_sequences(
                model, sequences, (layers.rank, layers.size), self.cp_exchange
            )
        if values is None:
            model = model.to(run.world.device)
        units = fsdp_units.find_units(model, block_classes)
        if run.world.shards > 1:
            self._shard(run, model, units, mesh, expert_mesh)
        if values is not None:
            dtensors.allocate(model, run.world.device)
            layout.replay(model, values)
        if self.activation_checkpointing and not run.config.gradient_checkpointing:
            fsdp_units.checkpoint_activations(units.values(), self.activation_checkpointing)
        if stages is not None:
            install_stages(model, stages)
        optimizer = make_optimizer(model) if make_optimizer else None
        sync, calls = None, None
        if isinstance(model, FSDPModule):
            sync = dtensors.GradientSync(model)
            # A pipeline runs forward passes before the backward passes of earlier ones: none
            # can be told apart.
            calls = RepeatedCalls(model, register_fsdp_forward_method) if stages is None else None
        state = MeshState(layout, sequence_split, stages, sync, calls)
        return PreparedModel(model=model, optimizer=optimizer, state=state)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Send gradients after the last micro-batch only."""
        state: MeshState = run.strategy_state
        if run.accumulation > 1 and state.sync is not None:
            state.sync.tell(last)
            if state.calls is not None:
                state.calls.begin(last)
        return _NO_CONTEXT

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Run the default, after which no gradient is left unsent."""
        share = defaults.backward(run, loss)
        state: MeshState = run.strategy_state
        if state.calls is not None:
            state.calls.finish()
        return share

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip by the norm of the whole gradient, over all parts of all ranks,
        and step the optimizer.
        """
        assert run.optimizer is not None  # the loop only steps runs that train
        state: MeshState = run.strategy_state
        layout = state.layout
        local: dict[str, Tensor] = {}
        # Each element of the model counts once in the norm, on one rank.
        counted: set[str] = set()
        for name, parameter in run.module.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            local[name], _ = dtensors.local_part(gradient)
            is_replica = layout.replica or dtensors.is_replica(gradient)
            is_first_of_group = layout.rank == 0 or name in layout.splits
            if is_first_of_group and not is_replica:
                counted.add(name)
        if state.sequences is not None:
            state.sequences.sum_gradients(local)
        norm = clip_gradients(local, clip, counted, run.world.device)
        result = defaults.step(run, Clip(norm=None, value=None))
        return replace(result, grad_norm=norm)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Return this rank's parts of the tensors. Nothing is gathered."""
        dtensors.reshard(run.module)
        mesh_state: MeshState = run.strategy_state
        return mesh_state.layout.save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        """Read this rank's parts of the tensors."""
        dtensors.reshard(run.module)
        mesh_state: MeshState = run.strategy_state
        return mesh_state.layout.load(run, state)

    def _expert_mesh(self, run: Run) -> DeviceMesh | None:
        """Return the mesh in which ranks share experts; ``None`` if each data shard has all."""
        if self.ep == 1:
            return None
        sizes = self.sizes(run.world.size)
        return make_expert_mesh(run.world.device.type, sizes, self.ep)

    def _shard(
        self,
        run: Run,
        model: nn.Module,
        units: dict[str, nn.Module],
        mesh: DeviceMesh,
        expert_mesh: DeviceMesh | None,
    ) -> None:
        """Shard each unit, and the rest of the model as the root, in place.

        Experts that are shared over ranks are units over ``expert_mesh``.
        """
        log.info("mesh: %s", fsdp_units.describe_units(model, units))
        policy = MixedPrecisionPolicy(
            param_dtype=self.gathered_in(run.config),
            reduce_dtype=self.dtype_of(run.config, self.reduce_dtype),
            cast_forward_inputs=False,
        )
        dtensors.make_contiguous(model)
        if expert_mesh is not None:
            # Before the blocks, which then leave them out.
            for experts in find_experts(model).values():
                fully_shard(experts, mesh=_data_mesh(expert_mesh, "expert_shard"), mp_policy=policy)
        for module in (*units.values(), model):
            fully_shard(module, mesh=_data_mesh(mesh, "shard"), mp_policy=policy)
        dtensors.refuse_mixed_dtypes(model)
        dtensors.sum_gradients(model)
        # transformers' generate() calls parts of the model, which must be gathered.
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")


def _data_mesh(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """Return the dimensions of ``mesh`` over which data shards are: ``shard``, and replicas."""
    has_replicas = mesh["replicate"].size() > 1
    return mesh["replicate", shard] if has_replicas else mesh[shard]


def _group(mesh: DeviceMesh) -> ParallelGroup:
    return ParallelGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())
