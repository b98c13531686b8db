"""``deepspeed``: DeepSpeed's engine under distcore's loop, ZeRO stages 0 to 3."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from distcore import (
    BuiltModel,
    Capabilities,
    ConfigError,
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
    hookimpl,
    join_process_group,
    leave_process_group,
)
from distcore.model import build_in_parts, return_large_blocks
from distcore_deepspeed import checkpoint, library
from distcore_deepspeed.build_engine import build
from distcore_deepspeed.checks import check_evaluation, check_training
from distcore_deepspeed.deferred_partitions import can_partition, replay
from distcore_deepspeed.engine import StepHooks, gathering_modules
from distcore_deepspeed.memory import zero_memory
from distcore_deepspeed.open_keys import open_values
from distcore_deepspeed.optimizers import OPTIMIZERS, check_schedule, own_values
from distcore_deepspeed.options import DeepSpeedOptions
from distcore_deepspeed.tracing import traced_engine
from distcore_deepspeed.unsupported import idle_option

log = logging.getLogger("distcore")
UNUSED = "an unused parameter gets a zero gradient, so weight decay changes it"
GATHERS = "gathers weights inside of every layer at stage 3"
WHOLE = (
    "at stage 3 a rank builds a model whole if its weights can be neither read nor drawn in parts"
)
FP32_ONLY = "stage 0 is for fp32 only; use stage 1 for bf16"


@dataclass(frozen=True, kw_only=True)
class DeepSpeedStrategy(DeepSpeedOptions, StepHooks):
    """Shard optimizer state, gradients and parameters over ranks, and keep them in host
    memory or on NVMe.
    """

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
        """The declaration for these options: it depends on the stage and on the scheduler."""
        user = self.user_config
        return Capabilities(
            spec_version=3,
            gradients=user.gradients,
            devices=frozenset({"cpu", "cuda"}),
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            optimizers=frozenset({"adamw", *OPTIMIZERS}),
            other_optimizers="elementwise",
            shards_parameters=user.stage == 3,
            lacks=frozenset(
                {"sparse gradients", "complex parameters", "parameters without elements"}
            ),
            hides_gradients=user.stage > 0,
            inner_gradients="none",  # the engine takes any backward pass for that of the loss
            why_not_phases=UNUSED,
            ema=user.keeps_masters,
            compiles=user.compiles,
            why_not_compiled=GATHERS,
            forward_cost=user.forward_cost,
            exact=user.exact,
            owns=frozenset({"precision", "optimizer", *(("schedule",) if user.scheduler else ())}),
            own_values=own_values(user),
            limits=(
                FP32_ONLY,
                UNUSED,
                "fp16 needs a GPU, or a CPU with fp16 arithmetic; nvme needs stage 3 and libaio",
                WHOLE,
            ),
            exempt={"unused-parameters": UNUSED} | ({"bf16": FP32_ONLY} if user.stage == 0 else {}),
        )

    def fill_config(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the values of distcore's keys in the user's JSON."""
        return open_values(self.user_config, config)

    def check_config(self, config: RunConfig) -> None:
        """Refuse, before launch, settings that DeepSpeed would refuse late,
        ignore, or get wrong.
        """
        check_training(self.user_config, config)
        check_schedule(self.user_config, config)
        if idle := idle_option(self, self.user_config, config):
            raise ConfigError(idle)

    def check_evaluation(self, config: RunConfig) -> None:
        """Refuse settings of an evaluation.

        It has no optimizer, so every stage takes every precision.
        """
        check_evaluation(self.user_config, config)

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory and the traffic of the stage.

        Raises ConfigError if they are not known.
        """
        return zero_memory(self.user_config, config, meta_model, ranks, make_optimizer)

    def traced(self) -> object:
        """Return a strategy that runs the engine on fake tensors.

        Raises ConfigError for state on NVMe.
        """
        return traced_engine(self.user_config, self.capabilities, self.activation_checkpointing)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group, and start DeepSpeed's communication on top of it."""
        # the engine reads it, also in one process
        os.environ.setdefault("LOCAL_RANK", str(rank_info.local_rank))
        world = join_process_group(config, rank_info)
        if self.user_config.stage == 3 and world.device.type == "cpu":
            return_large_blocks()
        rank, size = library.start(world.device, config.log_level == "debug")
        return replace(world, rank=rank, size=size)

    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> BuiltModel:
        """Return the model on the meta device if its weights can be read or drawn in partitions,
        else a whole model.
        """
        parts = (
            partial(replay, source) if source.replay and can_partition(self.user_config) else None
        )
        return build_in_parts(source, "deepspeed", parts)

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Build DeepSpeed's engine around the model.

        An evaluation needs an engine only at stage 3.
        """
        return build(self.user_config, run, model, make_optimizer, self.activation_checkpointing)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Return master weights and optimizer state of this rank's partitions, and the
        rest of the model.
        """
        return checkpoint.save(run)

    def gathering_modules(self, run: Run) -> dict[str, nn.Module]:
        """Return the modules with parameters of their own, which stage 3 gathers at each call."""
        return gathering_modules(run)

    def computed_weights(self, run: Run) -> State:
        """Return the partitions with which stage 3 computes, for the proof of the first save."""
        return checkpoint.computed_weights(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Load model, master weights, optimizer state and DeepSpeed's schedule."""
        return checkpoint.load(run, state, progress)

    @hookimpl
    def teardown(self, world: World) -> bool:
        """Forget DeepSpeed's process groups, and leave torch's."""
        library.stop()
        # ``setup`` set LOCAL_RANK, not a launcher: a later run would look for ranks
        if "RANK" not in os.environ:
            os.environ.pop("LOCAL_RANK", None)
        return leave_process_group(world)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Write DeepSpeed's resolved config to ``deepspeed.json`` in the run folder."""
        if run.world.is_main:
            text = json.dumps(run.strategy_state.config, indent=2, sort_keys=True)
            (Path(str(run.config.out)) / "deepspeed.json").write_text(text + "\n", encoding="utf-8")
