"""``accelerate``: Hugging Face Accelerate under distcore's loop; its DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from accelerate import DataLoaderConfiguration
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    ConfigError,
    Memory,
    OptimizerFactory,
    PreparedModel,
    Progress,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    State,
    StepResult,
    World,
    hookimpl,
    join_process_group,
    leave_process_group,
)
from distcore_accelerate.accelerator import new_accelerator, rank_environment, reset_state, world_of
from distcore_accelerate.backend import Backend
from distcore_accelerate.checks import check_settings
from distcore_accelerate.ddp import Replicated
from distcore_accelerate.fsdp2 import Sharded
from distcore_accelerate.options import AccelerateOptions
from distcore_accelerate.settings import Settings, read_settings


@dataclass(frozen=True, kw_only=True)
class AccelerateStrategy(AccelerateOptions):
    """Train on a backend of Hugging Face Accelerate, from its config file, its launcher or these options."""

    shorthand: ClassVar = "backend"
    tunes: ClassVar = ()  # its backends are tried under their own names

    @cached_property
    def settings(self) -> Settings:
        """What options, config file and launcher ask for together."""
        return read_settings(self)

    @cached_property
    def active_backend(self) -> Backend:
        """The backend that this run uses."""
        kind = {"ddp": Replicated, "fsdp2": Sharded}.get(self.settings.backend) or _zero()
        return kind(self, self.settings)

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the chosen backend declares."""
        return self.active_backend.capabilities()

    def fill_config(self, config: RunConfig) -> Mapping[str, Any]:
        """What the config file says of keys that are distcore's own."""
        settings = self.settings
        on_cpu = settings.use_cpu or settings.distributed_type == "MULTI_CPU"
        said = {
            "precision": settings.precision,
            "nproc": 1 if settings.distributed_type == "NO" else settings.processes,
            "device": "cpu" if on_cpu else None,
        }
        return dict(self.active_backend.open_values(config)) | {k: v for k, v in said.items() if v is not None}

    def check_config(self, config: RunConfig) -> None:
        """Refuse, before launch, what contradicts the config file and what Accelerate would replace silently."""
        check_settings(self.settings, config)
        self.active_backend.check_training(config)

    def check_evaluation(self, config: RunConfig) -> None:
        """The same for a run that only evaluates."""
        check_settings(self.settings, config)
        self.active_backend.check_evaluation(config)

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return what the chosen backend holds and sends."""
        return self.active_backend.plan_memory(config, meta_model, ranks, make_optimizer)

    def traced(self) -> object:
        """Return what stands for the chosen backend."""
        return self.active_backend.traced()

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group; return the world as Accelerate reports it for the chosen backend."""
        world = join_process_group(config, rank_info)
        with rank_environment(world):
            arguments = self._arguments(self.active_backend.plugins(config, world))
            reported = world_of(world, new_accelerator(self.settings, world, arguments))
        reset_state()  # with DeepSpeed's, transformers would build the model sharded
        return reported

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        """Have the backend prepare the model with an ``Accelerator``; an evaluation needs none."""
        if make_optimizer is None:
            return PreparedModel(model=self.active_backend.for_evaluation(run, model), optimizer=None)
        with rank_environment(run.world):
            arguments = self._arguments(self.active_backend.plugins_for(run, model))
            accelerator = new_accelerator(self.settings, run.world, arguments)
            return self.active_backend.prepare(accelerator, run, model, make_optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Return the backend's context for one micro-batch."""
        return self.active_backend.accumulate(run, last)

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add gradients as the backend does."""
        return self.active_backend.backward(run, loss)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip and step as the backend does."""
        return self.active_backend.step(run, clip)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Return what this rank holds under the backend."""
        return self.active_backend.save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Load the state as the backend holds it."""
        return self.active_backend.load(run, state, progress)

    @hookimpl
    def teardown(self, world: World) -> bool:
        """Forget the state of Accelerate and of the backend, and leave the process group."""
        reset_state()
        self.active_backend.teardown()
        return leave_process_group(world)

    def _arguments(self, plugins: dict[str, Any]) -> dict[str, Any]:
        loading = DataLoaderConfiguration(split_batches=self.split_batches, dispatch_batches=self.dispatch_batches)
        return {"dataloader_config": loading} | plugins


def _zero() -> type[Backend]:
    """The DeepSpeed backend, imported only where it is asked for; raises ConfigError, one line, if that fails."""
    try:
        from distcore_accelerate.zero import ZeRO
    except (ImportError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"backend = 'deepspeed': distcore-deepspeed does not import ({reason}); "
            "install it as you installed distcore-accelerate"
        ) from error
    return ZeRO
