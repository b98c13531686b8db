"""The interface of Accelerate's backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    ConfigError,
    Memory,
    OptimizerFactory,
    PreparedModel,
    Progress,
    Run,
    RunConfig,
    SavedState,
    State,
    StepResult,
    World,
    defaults,
)
from distcore_accelerate.options import AccelerateOptions
from distcore_accelerate.settings import Settings


class Backend(ABC):
    """One of Accelerate's ways to spread a model, as parts of the hooks of the same names.

    What a backend leaves out is done as in one process.
    """

    def __init__(self, options: AccelerateOptions, settings: Settings) -> None:
        self.options = options
        self.settings = settings

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return what the backend declares, with these options."""

    def open_values(self, config: RunConfig) -> Mapping[str, Any]:
        """Return, by dotted key, what the backend's own config says of distcore's keys."""
        return {}

    def check_training(self, config: RunConfig) -> None:
        """Raise ConfigError, one line, for what can be known to go wrong before ranks start to train."""
        self.check_evaluation(config)

    def check_evaluation(self, config: RunConfig) -> None:  # noqa: B027  # most have nothing to refuse
        """Raise ConfigError, one line, for settings of an evaluation that cannot work."""

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory and the traffic of each rank. Raises ConfigError if they are not known."""
        raise ConfigError(f"backend = {self.settings.backend!r}: what it holds is not known")

    def traced(self) -> object:
        """Return a stand-in for traced steps. Raises ConfigError for a backend without one."""
        raise ConfigError(f"backend = {self.settings.backend!r}: how its step can be traced is not known")

    @abstractmethod
    def plugins(self, config: RunConfig, world: World) -> dict[str, Any]:
        """Return arguments that make an ``Accelerator`` this backend, before there is a model."""

    def plugins_for(self, run: Run, model: nn.Module) -> dict[str, Any]:
        """The same for the ``Accelerator`` that is to prepare ``model``."""
        return self.plugins(run.config, run.world)

    @abstractmethod
    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel:
        """Return the model as ``accelerator`` wraps it, and the optimizer that ``step`` steps."""

    def for_evaluation(self, run: Run, model: nn.Module) -> nn.Module:
        """Return the model for a run without an optimizer."""
        return model.to(run.world.device)

    @abstractmethod
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Return the context of one micro-batch; ``last`` is the one after which gradients are averaged."""

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add the gradients of the scalar ``loss``; return it detached."""
        return defaults.backward(run, loss)

    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip, step the optimizer and clear the gradients."""
        return defaults.step(run, clip)

    def save(self, run: Run) -> State:
        """Return what this rank holds of model and optimizer, by neutral names."""
        return defaults.save_checkpoint(run)

    def load(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Load a checkpoint of any strategy, saved at ``progress``, into model and optimizer; always true."""
        return defaults.load_checkpoint(run, state)

    def teardown(self) -> None:  # noqa: B027  # most keep nothing
        """Forget what the backend keeps beside the process group."""
