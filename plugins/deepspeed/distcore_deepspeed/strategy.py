"""``deepspeed``: DeepSpeed's engine under distcore's loop, ZeRO stages 0 to 3."""

from __future__ import annotations

import json
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    State,
    StepResult,
    World,
    defaults,
    gather_rows,
    hookimpl,
    join_process_group,
    leave_process_group,
    sum_over_ranks,
)
from distcore_deepspeed import backend, shards
from distcore_deepspeed.claims import check, check_evaluation
from distcore_deepspeed.engine import build_engine, explained
from distcore_deepspeed.optimizers import OPTIMIZERS
from distcore_deepspeed.settings import Tree, read

log = logging.getLogger("distcore")
_NOTHING = nullcontext()

UNUSED = "a parameter that takes no part gets a gradient of zero, so weight decay moves it"
FP32_ONLY = "stage 0 is for fp32; stage 1 does the same in bf16"
Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class DeepSpeedStrategy:
    """Shard optimizer state, gradients and parameters over ranks, and keep them in host memory or on NVMe."""

    shorthand: ClassVar = "stage"

    stage: Literal[0, 1, 2, 3] | None = None
    """What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. Default 2, or config's."""
    offload_optimizer: Device | None = None
    """Where the optimizer's state and its step live: none, cpu, or nvme (stage 3)."""
    offload_param: Device | None = None
    """Where parameters wait between uses: none, cpu or nvme; stage 3."""
    nvme_path: str | None = None
    """Folder on a fast local disk for what is offloaded to nvme."""
    overlap_comm: bool | None = None
    """Reduce gradients while the backward pass goes on; DeepSpeed's default: at stage 3."""
    reduce_bucket_size: int | Literal["auto"] | None = None
    """Elements of one gradient reduction; auto: hidden size squared."""
    allgather_bucket_size: int | None = None
    """Elements of one all-gather of updated weights, stages 1 and 2."""
    round_robin_gradients: bool | None = None
    """Spread the copying of gradients to the host over ranks; stages 1 and 2 with offload."""
    sub_group_size: int | None = None
    """Elements that one optimizer call updates at stage 3."""
    stage3_prefetch_bucket_size: int | Literal["auto"] | None = None
    """Elements gathered ahead of their use; auto: 0.9 hidden size squared."""
    stage3_param_persistence_threshold: int | Literal["auto"] | None = None
    """Parameters smaller than this stay whole on every rank; default auto: 10 times the hidden size."""
    stage3_max_live_parameters: int | None = None
    """Most elements that are whole at a time on a rank."""
    stage3_max_reuse_distance: int | None = None
    """Elements within which a parameter that is used again is not released."""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """What gradients are sent as; lower than the precision of the run is no longer exactly the gradient of law 2."""
    activation_checkpointing: bool = False
    """Recompute activations with DeepSpeed's function instead of torch's."""
    cpu_checkpointing: bool | None = None
    """Keep the activations that are checkpointed in host memory."""
    initial_scale_power: int | None = None
    """fp16: the first loss scale is 2 to this power."""
    loss_scale_window: int | None = None
    """fp16: steps without overflow after which the scale doubles."""
    hysteresis: int | None = None
    """fp16: overflows before the scale is halved."""
    min_loss_scale: int | None = None
    """fp16: the scale at which the run gives up."""
    scheduler: Literal["WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest"] | None = None
    """DeepSpeed's scheduler, instead of schedule.name."""
    scheduler_params: dict[str, Any] = field(default_factory=dict)
    """Its parameters; what is missing comes from lr, schedule and the number of steps."""
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    """Parameters of DeepSpeed's optimizer beside lr, betas, eps and weight_decay; torch_adam: torch's AdamW."""
    config: str | dict[str, Any] | None = None
    """DeepSpeed's own JSON: a path, or the tree itself."""

    @cached_property
    def given(self) -> Tree:
        """What the user said in DeepSpeed's terms: the JSON, with the sections that options stand for."""
        tree = read(self.config)
        for section, kind, parameters in (
            ("scheduler", self.scheduler, self.scheduler_params),
            ("optimizer", None, self.optimizer_params),
        ):
            if kind or parameters:
                tree[section] = {"params": {}} | tree.get(section, {})
                tree[section] |= {"type": kind} if kind else {}
                tree[section]["params"] = tree[section]["params"] | parameters
        return tree

    @property
    def zero_stage(self) -> int:
        given = self.given.get("zero_optimization", {}).get("stage", "auto")
        return self.stage if self.stage is not None else 2 if given == "auto" else int(given)

    @property
    def capabilities(self) -> Capabilities:
        stage = self.zero_stage
        return Capabilities(
            spec_version=2,
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            optimizers=frozenset({"adamw", *OPTIMIZERS}),
            shards_parameters=stage == 3,
            owns=frozenset({"precision", *(("schedule",) if self.given.get("scheduler", {}).get("type") else ())}),
            limits=(
                FP32_ONLY,
                UNUSED,
                "fp16 needs a GPU or a CPU that multiplies in it; nvme needs stage 3 and libaio",
            ),
            exempt={"unused-parameters": UNUSED} | ({"bf16": FP32_ONLY} if stage == 0 else {}),
        )

    def check_config(self, config: RunConfig) -> None:
        """Refuse, before launch, what DeepSpeed would refuse late, ignore, or get wrong."""
        check(self, config)

    def check_evaluation(self, config: RunConfig) -> None:
        """The same for a run that only evaluates: no optimizer, so that every stage takes every precision."""
        check_evaluation(self, config)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        os.environ.setdefault("LOCAL_RANK", str(rank_info.local_rank))  # DeepSpeed's engine reads it, also when alone
        world = join_process_group(config, rank_info)
        backend.prepare(world.device, config.log_level == "debug")
        rank, size = backend.join_comm()
        return World(rank=rank, size=size, local_rank=rank_info.local_rank, device=world.device)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        return build_engine(self, run, model, make_optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        # Not DeepSpeed's own count of micro-batches: a ragged last step has fewer of them.
        _engine(run).set_gradient_accumulation_boundary(last)
        return _NOTHING

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        # The loss is scaled already: DeepSpeed must not divide it by the number of micro-batches. Its mean over
        # ranks is the one that Capabilities.gradients declares.
        _engine(run).backward(loss, scale_wrt_gas=False)
        return loss.detach()

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        engine = _engine(run)
        if self.zero_stage == 0:  # where DeepSpeed clips but does not report the norm
            norm = defaults.clip_gradients(cast(Any, run.optimizer), clip)
            engine.step()
            return StepResult(grad_norm=norm)
        with explained():
            engine.step()
        norm = engine.get_global_grad_norm()
        return StepResult(grad_norm=None if clip.norm is None else norm)

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        return shards.save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        shards.load(run, state)
        scheduler = getattr(run.model, "lr_scheduler", None)
        if scheduler is not None and (done := shards.steps_done(state)):
            scheduler.step(done - 1)  # it counts from -1
        return True

    @hookimpl
    def teardown(self, world: World) -> bool:
        backend.leave_comm()
        return leave_process_group(world)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.world.is_main:
            text = json.dumps(_engine(run).config, indent=2, sort_keys=True)
            (Path(str(run.config.out)) / "deepspeed.json").write_text(text + "\n", encoding="utf-8")


def _engine(run: Run) -> Any:
    return cast(Any, run.model)
