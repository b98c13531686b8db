"""``mesh``: layers, sequences and blocks split over groups of ranks; sharded and replicated over the groups (FSDP2)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from distcore import (
    Capabilities,
    Clip,
    ConfigError,
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    SkeletonError,
    State,
    StepResult,
    StrategyError,
    Values,
    World,
    defaults,
    dtensors,
    gather_rows,
    hookimpl,
    join_process_group,
    leave_process_group,
    repeated_classes,
    sum_over_ranks,
)
from distcore_fsdp import blocks, memory
from distcore_mesh.clipping import clip_gradients
from distcore_mesh.group import Group
from distcore_mesh.layers import check_head, split_layers, styles_for
from distcore_mesh.pipeline import train_step
from distcore_mesh.plans import plan_for, read_plan
from distcore_mesh.sequences import check_sequences, split_sequences
from distcore_mesh.splits import Layout, Split
from distcore_mesh.stages import check_stages, cut_into_stages, end_forward_early, of_stage, stage_of
from distcore_mesh.tokens import check_tokens

log = logging.getLogger("distcore")
_NO_CONTEXT = nullcontext()
Dtype = Literal["fp32", "precision"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class MeshStrategy:
    """Split layers, sequences and blocks over groups of ranks; shard over some groups, replicate over others."""

    tunes: ClassVar[tuple[dict[str, Any], ...]] = ({"tp": 2},)

    tp: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each layer (tensor parallelism). They train on the same rows: one data shard."""
    sequence_parallel: bool = False
    """Split what ranks of ``tp`` would all compute alike in the blocks, such as norms and dropout, by tokens."""
    loss_parallel: bool = False
    """Leave the logits of a head that is split by vocabulary split for the loss in training, not gathered."""
    replicate: Annotated[int, Field(ge=1)] | None = None
    """Groups of ranks that hold the same parameters; default: what ``tp`` and ``shard`` leave, or 1."""
    shard: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2); default: all that are left."""
    cp: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each sequence in the blocks of a decoder (context parallelism); part of a data shard, too."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Stages of a pipeline: each has its share of the model's blocks, and passes what it computes on to the next."""
    pp_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of a stage's passes: forward and backward in turns, or all forward passes first."""
    param_dtype: Dtype = "fp32"
    """Dtype in which shards are gathered; the master copy is always fp32. ``precision``: the dtype of
    ``--precision``, which also rounds embeddings and normalisations."""
    reduce_dtype: Dtype = "fp32"
    """Dtype in which gradients are averaged over data shards. ``precision``: the dtype of ``--precision``."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in backward, instead of keeping them."""
    plan: str | None = None
    """A file that says which layers are split, and how: ``NAME: STYLE`` on each line. Default: the plan for the type of
    model, or the one that the model has."""

    def __post_init__(self) -> None:
        if self.pp > 1:  # else the strategy has no such hook, so that the loop's own passes run
            object.__setattr__(self, "train_step", train_step)

    @property
    def capabilities(self) -> Capabilities:
        """What the strategy declares; the ranks of a data shard depend on ``tp``, ``cp`` and ``pp``."""
        return Capabilities(
            spec_version=2,
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

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError for sizes that do not make the ranks, a plan that is none, and what excludes another."""
        self.sizes(int(config.nproc))
        if self.plan is not None:
            read_plan(self.plan)
            if self.tp == 1:
                raise ConfigError(f"strategy_options.plan = {self.plan!r}: is for tp greater than 1")
        if self.tp > 1 and config.lora.rank is not None:
            raise ConfigError(f"lora.rank = {config.lora.rank}: strategy 'mesh' trains adapters with tp = 1 only")
        if self.pp > 1 and self.cp > 1:
            raise ConfigError(f"strategy_options.pp = {self.pp}: not with cp = {self.cp}; choose one of them")
        if self.pp > 1 and config.lora.rank is not None:
            raise ConfigError(f"lora.rank = {config.lora.rank}: strategy 'mesh' trains adapters with pp = 1 only")
        if self.sequence_parallel and (self.tp == 1 or self.cp > 1 or self.pp > 1):
            without = "needs tp greater than 1" if self.tp == 1 else f"not with {'cp' if self.cp > 1 else 'pp'}"
            raise ConfigError(f"strategy_options.sequence_parallel = true: {without}")
        if self.loss_parallel and self.tp == 1:
            raise ConfigError("strategy_options.loss_parallel = true: needs tp greater than 1")
        if self.cp > 1 and self.activation_checkpointing:
            instead = "use --set gradient_checkpointing=true"
            raise ConfigError(f"strategy_options.activation_checkpointing: not with cp = {self.cp}; {instead}")

    def check_model(self, config: RunConfig, skeleton: nn.Module) -> None:
        """Raise StrategyError for a model without a plan, or whose heads, sizes or blocks the ranks do not divide."""
        if self.tp > 1:
            styles = styles_for(skeleton, plan_for(skeleton, self.plan), self.tp)
            if self.sequence_parallel:
                check_tokens(skeleton, styles)
            if self.loss_parallel:
                check_head(skeleton, styles)
        if self.cp > 1:
            check_sequences(skeleton, self.cp, self.tp)
        if self.pp > 1:
            check_stages(skeleton, self.pp)

    def sizes(self, ranks: int) -> tuple[int, int, int, int, int]:
        """Return ``pp``, ``replicate``, ``shard``, ``cp``, ``tp``; raises ConfigError if they do not make the ranks."""
        inner = {"tp": self.tp, "cp": self.cp, "pp": self.pp}
        given = {name: size if size > 1 else None for name, size in inner.items()}
        given |= {"replicate": self.replicate, "shard": self.shard}
        unit = self.tp * self.cp * self.pp * (self.replicate or 1) * (self.shard or 1)
        left, over = divmod(ranks, unit)
        if over or (left > 1 and self.replicate is not None and self.shard is not None):
            said = " * ".join(f"{name} = {size}" for name, size in given.items() if size is not None)
            closed = self.replicate is not None and self.shard is not None
            would = f"{unit} ranks would" if closed else f"a multiple of {unit} would"
            raise ConfigError(f"strategy_options: {said} does not make nproc = {ranks}: {would}")
        if self.shard is None:
            return self.pp, self.replicate or 1, left, self.cp, self.tp
        return self.pp, self.replicate or left, self.shard, self.cp, self.tp

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
            memory.return_large_blocks()
        stage, in_stage = divmod(world.rank, world.size // self.pp)
        shard, number = divmod(in_stage, self.tp * self.cp)
        shards = world.size // (self.tp * self.cp * self.pp)
        return replace(world, shard=shard, shards=shards, speaks=number == 0 and stage == self.pp - 1)

    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> nn.Module:
        """Return the model on the meta device if its random weights can be drawn one by one, else a whole one."""
        if source.replayed is None:
            return source.build()
        try:
            model, values = source.replayed()
        except SkeletonError as reason:
            log.info("mesh: every rank builds the whole model: %s", reason)
            return source.build()
        vars(model)["distcore_weights"] = values
        return model

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        """Split the layers that the plan names, then shard what each rank holds."""
        values: Values | None = vars(model).pop("distcore_weights", None)
        mesh = self._mesh(run.world)
        layers, sequences = _group(mesh["tp"]), _group(mesh["cp"])
        splits: dict[str, Split] = {}
        tokens = None
        if self.tp > 1:
            splits, tokens = split_layers(
                model, plan_for(model, self.plan), layers, self.sequence_parallel, self.loss_parallel
            )
        layout = Layout(splits, layers.rank, layers.size, replica=sequences.rank > 0)
        kinds = tuple(repeated_classes(model))  # of the whole model: a stage may have one block
        if self.pp > 1:
            stage = stage_of(mesh, self.pp_schedule)
            make_optimizer = make_optimizer and partial(of_stage, make_optimizer(model), dict(model.named_parameters()))
            mine = cut_into_stages(model, stage, self._param_dtype(run), run.world.device)
            first = run.world.rank == stage.rank * (run.world.size // self.pp)
            layout = replace(layout, of_stage=mine, is_first_of_stage=first)
            vars(model)["distcore_stage"] = stage
        # The model is all that the core hands from hook to hook.
        vars(model)["distcore_layout"] = layout
        vars(model)["distcore_sequences"] = split_sequences(model, sequences, self.tp) if self.cp > 1 else tokens
        if values is None:
            model = model.to(run.world.device)
        units = blocks.blocks(model, kinds)
        if run.world.shards > 1:
            self._shard(
                run, model, units, mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
            )
        if values is not None:
            dtensors.allocate(model, run.world.device)
            layout.replay(model, values)
        if self.activation_checkpointing and not run.config.gradient_checkpointing:
            blocks.recompute(units.values())
        if self.pp > 1:
            end_forward_early(model, stage)
        return PreparedModel(model=model, optimizer=make_optimizer(model) if make_optimizer else None)

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
        layout, sequences = _layout(run), vars(run.module).get("distcore_sequences")
        gradients = {name: p.grad for name, p in run.module.named_parameters() if p.grad is not None}
        held = {name: dtensors.local_part(gradient)[0] for name, gradient in gradients.items()}
        if sequences is not None:
            sequences.sum_gradients(held)
        counted = {
            name
            for name, gradient in gradients.items()
            if not (layout.replica or dtensors.is_replica(gradient)) and (layout.rank == 0 or name in layout.splits)
        }
        norm = clip_gradients(held, clip, counted, run.world.device)
        defaults.step(run, Clip(norm=None, value=None))
        return StepResult(grad_norm=norm)

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        """Sum the values over ranks."""
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collect the rows of all ranks, in rank order."""
        return gather_rows(outputs)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Return the parts of tensors that this rank holds; nothing is gathered."""
        blocks.reshard(run.module)
        return _layout(run).save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        """Read the parts of tensors that this rank holds."""
        blocks.reshard(run.module)
        return _layout(run).load(run, state)

    @hookimpl
    def teardown(self, world: World) -> bool:
        """Leave the process group."""
        return leave_process_group(world)

    def _mesh(self, world: World) -> DeviceMesh:
        sizes = self.sizes(world.size)
        return init_device_mesh(world.device.type, sizes, mesh_dim_names=("pp", "replicate", "shard", "cp", "tp"))

    def _param_dtype(self, run: Run) -> torch.dtype:
        return DTYPES[run.config.precision] if self.param_dtype == "precision" else torch.float32

    def _shard(self, run: Run, model: nn.Module, units: dict[str, nn.Module], mesh: DeviceMesh) -> None:
        log.info("mesh: %s", blocks.describe(model, units))
        reduce_dtype = DTYPES[run.config.precision] if self.reduce_dtype == "precision" else torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=self._param_dtype(run), reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        for module in (*units.values(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if hasattr(model, "generate"):  # of transformers; it calls parts of the model, whose weights must be there
            register_fsdp_forward_method(model, "generate")


def _group(mesh: DeviceMesh) -> Group:
    return Group(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def _layout(run: Run) -> Layout:
    return cast(Layout, vars(run.module)["distcore_layout"])
