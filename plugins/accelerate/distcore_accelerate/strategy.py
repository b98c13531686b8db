"""``accelerate``: Hugging Face Accelerate under distcore's loop; its DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from accelerate import DataLoaderConfiguration
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
    gather_rows,
    hookimpl,
    join_process_group,
    leave_process_group,
    sum_over_ranks,
)
from distcore_accelerate.backend import Backend, forget, new_accelerator, surroundings, world_of
from distcore_accelerate.checks import check, check_evaluation
from distcore_accelerate.ddp import Replicated
from distcore_accelerate.fsdp2 import Sharded
from distcore_accelerate.settings import BackendName, Settings, read_settings
from distcore_accelerate.zero import ZeRO

BACKENDS: dict[BackendName, type[Backend]] = {"ddp": Replicated, "fsdp2": Sharded, "deepspeed": ZeRO}


@dataclass(frozen=True, kw_only=True)
class AccelerateStrategy:
    """Train on a backend of Hugging Face Accelerate, from its config file, its launcher or these options."""

    shorthand: ClassVar = "backend"

    backend: BackendName | None = None
    """Accelerate's way to spread the model: ddp, fsdp2 or deepspeed; default: the config file's, else ddp."""
    config_file: str | None = None
    """YAML or JSON file of accelerate config."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """deepspeed: what is sharded, as in DeepSpeed; default 2, or what its config says."""
    deepspeed_config: str | dict[str, Any] | None = None
    """deepspeed: DeepSpeed's own JSON, a path or the tree itself."""
    find_unused: bool = False
    """ddp: some parameters take no part in some steps; costs a walk over the graph each step."""
    bucket_mb: int = 25
    """ddp: gradient bucket size in MiB."""
    reshard_after_forward: bool = True
    """fsdp2: free the gathered parameters between forward and backward."""
    cpu_offload: bool = False
    """fsdp2: keep parameters, gradients and optimizer state in host memory."""
    wrap_classes: tuple[str, ...] = ()
    """fsdp2: class names of the layers to shard one by one; default: what the model says it must not split."""
    split_batches: bool = False
    """Passed on to Accelerate; moves no row here: the global batch is always split over ranks."""
    dispatch_batches: bool | None = None
    """Passed on to Accelerate; moves no row here: every rank reads its own."""

    @cached_property
    def settings(self) -> Settings:
        """What options, config file and launcher ask for together."""
        return read_settings(self)

    @cached_property
    def way(self) -> Backend:
        """The backend that this run uses."""
        return BACKENDS[self.settings.backend]()

    @cached_property
    def capabilities(self) -> Capabilities:
        return self.way.capabilities(self)

    def fill_config(self) -> Mapping[str, Any]:
        """What the config file says of keys that are distcore's own."""
        settings = self.settings
        on_cpu = settings.use_cpu or settings.distributed_type == "MULTI_CPU"
        said = {
            "precision": settings.precision,
            "nproc": 1 if settings.distributed_type == "NO" else settings.processes,
            "device": "cpu" if on_cpu else None,
        }
        return {key: value for key, value in said.items() if value is not None}

    def check_config(self, config: RunConfig) -> None:
        """Refuse, before launch, what contradicts the config file and what Accelerate would replace silently."""
        check(self, config)

    def check_evaluation(self, config: RunConfig) -> None:
        """The same for a run that only evaluates."""
        check_evaluation(self, config)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        world = join_process_group(config, rank_info)
        with surroundings(world):
            reported = world_of(new_accelerator(self.settings, world, self._arguments(config, world)))
        forget()  # until the model is wrapped: transformers would build it in pieces that we do not know
        return reported

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        if make_optimizer is None:
            return PreparedModel(model=self.way.for_evaluation(run, model), optimizer=None)
        with surroundings(run.world):
            arguments = self._arguments(run.config, run.world, run.total_steps)
            accelerator = new_accelerator(self.settings, run.world, arguments)
            return self.way.prepare(accelerator, run, model, make_optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        return self.way.accumulate(run, last)

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        return self.way.backward(run, loss)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        return self.way.step(run, clip)

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        return self.way.save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        return self.way.load(run, state)

    @hookimpl
    def teardown(self, world: World) -> bool:
        forget()
        self.way.leave()
        return leave_process_group(world)

    def _arguments(self, config: RunConfig, world: World, total_steps: int | None = None) -> dict[str, Any]:
        loading = DataLoaderConfiguration(split_batches=self.split_batches, dispatch_batches=self.dispatch_batches)
        return {"dataloader_config": loading} | self.way.plugins(self, config, world, total_steps)
