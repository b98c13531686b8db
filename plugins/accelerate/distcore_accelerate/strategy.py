"""``accelerate``: Hugging Face Accelerate under distcore's loop, with DDP, FSDP2 or DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

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
from distcore_accelerate.checks import check_options, check_settings
from distcore_accelerate.ddp import Replicated
from distcore_accelerate.fsdp2 import Sharded
from distcore_accelerate.options import AccelerateOptions
from distcore_accelerate.settings import Settings, read_settings


@dataclass(frozen=True, kw_only=True)
class AccelerateStrategy(AccelerateOptions):
    """Train with a backend of Hugging Face Accelerate, chosen by its config file, its
    launcher or these options.
    """

    shorthand: ClassVar = "backend"
    tunes: ClassVar = ()  # its backends are tried under their own names

    @cached_property
    def settings(self) -> Settings:
        """Settings from options, config file and launcher together."""
        return read_settings(self)

    @cached_property
    def active_backend(self) -> Backend:
        """The backend that this run uses."""
        kind = {"ddp": Replicated, "fsdp2": Sharded}.get(self.settings.backend) or _zero()
        return kind(self, self.settings)

    @cached_property
    def capabilities(self) -> Capabilities:
        """Capabilities of the active backend."""
        return self.active_backend.capabilities()

    def fill_config(self, config: RunConfig) -> Mapping[str, Any]:
        """Return distcore's keys from the config file and the backend's own config."""
        settings = self.settings
        on_cpu = settings.use_cpu or settings.distributed_type == "MULTI_CPU"
        said = {
            "precision": settings.precision,
            "nproc": (
                1
                if settings.distributed_type == "NO"
                else settings.processes
                if settings.machines == 1
                else None
            ),
            "device": "cpu" if on_cpu else None,
        }
        return dict(self.active_backend.open_values(config)) | {
            k: v for k, v in said.items() if v is not None
        }

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError for contradictions to the config file, and settings
        that Accelerate silently replaces.
        """
        check_options(self, self.settings.backend)
        check_settings(self.settings, config)
        self.active_backend.check_training(config)

    def check_evaluation(self, config: RunConfig) -> None:
        """Raise ConfigError as ``check_config`` does, for a run that only evaluates."""
        check_settings(self.settings, config)
        self.active_backend.check_evaluation(config)

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory and the traffic of the active backend."""
        return self.active_backend.plan_memory(config, meta_model, ranks, make_optimizer)

    def traced(self) -> object:
        """Return the stand-in of the active backend."""
        return self.active_backend.traced()

    def gathering_modules(self, run: Run) -> Mapping[str, nn.Module]:
        """Return those of the active backend."""
        return self.active_backend.gathering_modules(run)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group.

        Return the world that Accelerate reports for the active backend.
        """
        world = join_process_group(config, rank_info)
        with rank_environment(world):
            arguments = self.active_backend.plugins(config, world)
            reported = world_of(world, new_accelerator(self.settings, world, arguments))
        reset_state()  # with DeepSpeed's state, transformers would build the model sharded
        return reported

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Prepare the model with an ``Accelerator``. An evaluation needs none."""
        if make_optimizer is None:
            return PreparedModel(
                model=self.active_backend.for_evaluation(run, model), optimizer=None
            )
        with rank_environment(run.world):
            arguments = self.active_backend.plugins_for_model(run, model)
            accelerator = new_accelerator(self.settings, run.world, arguments)
            return self.active_backend.prepare(accelerator, run, model, make_optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Return the backend's context for one micro-batch."""
        return self.active_backend.accumulate(run, last)

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Run the backend's backward pass."""
        return self.active_backend.backward(run, loss)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Run the backend's clipping and step."""
        return self.active_backend.step(run, clip)

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        """Return this rank's part of the backend's state."""
        return self.active_backend.save(run)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Load this rank's part of the state into the backend."""
        return self.active_backend.load(run, state, progress)

    @hookimpl
    def teardown(self, world: World) -> bool:
        """Reset Accelerate and the backend, and leave the process group."""
        reset_state()
        self.active_backend.teardown()
        return leave_process_group(world)


def _zero() -> type[Backend]:
    """Import the DeepSpeed backend, which is optional.

    Raises ConfigError, one line, if that fails.
    """
    try:
        from distcore_accelerate.zero import ZeRO
    except (ImportError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"backend = 'deepspeed': distcore-deepspeed does not import ({reason}); "
            "install it as you installed distcore-accelerate"
        ) from error
    return ZeRO
