"""``deepspeed``: DeepSpeed's engine under distcore's loop, ZeRO stages 0 to 3."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from distcore import (
    BuiltModel,
    Capabilities,
    Memory,
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    Progress,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    State,
    World,
    build_in_parts,
    hookimpl,
    join_process_group,
    leave_process_group,
    return_large_blocks,
)
from distcore_deepspeed import library, partitions
from distcore_deepspeed.build import build
from distcore_deepspeed.checks import check_evaluation, check_training
from distcore_deepspeed.drawn import can_partition
from distcore_deepspeed.engine import StepHooks
from distcore_deepspeed.memory import planned
from distcore_deepspeed.optimizers import OPTIMIZERS, check_schedule
from distcore_deepspeed.options import DeepSpeedOptions
from distcore_deepspeed.tracing import traced

log = logging.getLogger("distcore")
UNUSED = "a parameter that takes no part gets a gradient of zero, so weight decay moves it"
GATHERS = "gathers weights inside of every layer at stage 3"
WHOLE = "at stage 3 a pretrained model, or one whose random weights cannot be replayed, is built whole on every rank"
FP32_ONLY = "stage 0 is for fp32; stage 1 does the same in bf16"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedStrategy(DeepSpeedOptions, StepHooks):
    """Shard optimizer state, gradients and parameters over ranks, and keep them in host memory or on NVMe."""

    shorthand: ClassVar = "stage"
    tunes: ClassVar[tuple[dict[str, Any], ...]] = (
        {"stage": 1, "reduce_bucket_size": "auto"},
        {"stage": 2, "reduce_bucket_size": "auto"},
        {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": "cpu"},
        {"stage": 3},
        {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        {"stage": 3, "offload_param": "cpu"},
        {"stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
    )

    @property
    def capabilities(self) -> Capabilities:
        """Sharding, ownership of the schedule and what is exempt depend on stage and scheduler."""
        user = self.user_config
        return Capabilities(
            spec_version=3,
            devices=frozenset({"cpu", "cuda"}),
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            optimizers=frozenset({"adamw", *OPTIMIZERS}),
            other_optimizers="elementwise",
            shards_parameters=user.stage == 3,
            ema=user.keeps_masters,
            compiles=user.compiles,
            why_not_compiled=GATHERS,
            forward_cost=user.forward_cost,
            owns=frozenset({"precision", "optimizer", *(("schedule",) if user.scheduler else ())}),
            limits=(
                FP32_ONLY,
                UNUSED,
                "fp16 needs a GPU or a CPU that multiplies in it; nvme needs stage 3 and libaio",
                WHOLE,
            ),
            exempt={"unused-parameters": UNUSED} | ({"bf16": FP32_ONLY} if user.stage == 0 else {}),
        )

    def check_config(self, config: RunConfig) -> None:
        """Refuse, before launch, what DeepSpeed would refuse late, ignore, or get wrong."""
        check_training(self.user_config, config)
        check_schedule(self.user_config, config)

    def check_evaluation(self, config: RunConfig) -> None:
        """The same for a run that only evaluates: no optimizer, so that every stage takes every precision."""
        check_evaluation(self.user_config, config)

    def plan_memory(
        self, config: RunConfig, skeleton: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return what the stage holds and sends; raises ConfigError for what is not known."""
        return planned(self.user_config, config, skeleton, ranks, make_optimizer)

    def traced(self) -> object:
        """Return the engine as it runs without values; raises ConfigError for state on NVMe."""
        return traced(self.user_config, self.capabilities, self.activation_checkpointing)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group, and put DeepSpeed's communication on top of it."""
        os.environ.setdefault("LOCAL_RANK", str(rank_info.local_rank))  # DeepSpeed's engine reads it, also when alone
        world = join_process_group(config, rank_info)
        if self.user_config.stage == 3 and world.device.type == "cpu":
            return_large_blocks()
        rank, size = library.start(world.device, config.log_level == "debug")
        return replace(world, rank=rank, size=size)

    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> BuiltModel:
        """Return the model on the meta device if its random weights can be drawn in partitions, else a whole one."""
        return build_in_parts(source, "deepspeed", source.replayed if can_partition(self.user_config) else None)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        """Build DeepSpeed's engine around the model; an evaluation has one only at stage 3."""
        return build(self.user_config, run, model, make_optimizer, self.activation_checkpointing)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Return master weights and optimizer state of this rank's partitions, and the rest of the model."""
        return partitions.save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Load model, master weights, optimizer state and the place in DeepSpeed's schedule."""
        return partitions.load(run, state, progress)

    @hookimpl
    def teardown(self, world: World) -> bool:
        """Forget DeepSpeed's process groups, and leave torch's."""
        library.stop()
        if "RANK" not in os.environ:  # no launcher has set it: ``setup`` did, and who comes after would look for ranks
            os.environ.pop("LOCAL_RANK", None)
        return leave_process_group(world)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Write DeepSpeed's resolved config to ``deepspeed.json`` in the run folder."""
        if run.world.is_main:
            text = json.dumps(run.strategy_state.config, indent=2, sort_keys=True)
            (Path(str(run.config.out)) / "deepspeed.json").write_text(text + "\n", encoding="utf-8")
