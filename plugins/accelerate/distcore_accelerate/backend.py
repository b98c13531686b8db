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
    """One of Accelerate's backends, with methods named after the hooks that call them.

    Methods that a backend does not override work as in one process.
    """

    def __init__(self, options: AccelerateOptions, settings: Settings) -> None:
        self.options = options
        self.settings = settings

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the capabilities of the backend with these options."""

    def open_values(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the values of distcore's keys in the backend's own config, by dotted key."""
        return {}

    def check_training(self, config: RunConfig) -> None:
        """Raise ConfigError, one line, for settings that training cannot work with."""
        self.check_evaluation(config)

    def check_evaluation(self, config: RunConfig) -> None:  # noqa: B027  # optional
        """Raise ConfigError, one line, for settings that evaluation cannot work with."""

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory and the traffic of each rank.

        Raises ConfigError if they are unknown.
        """
        raise ConfigError(f"backend = {self.settings.backend!r}: its memory is not known")

    def traced(self) -> object:
        """Return a stand-in for traced steps. Raises ConfigError for a backend without one."""
        raise ConfigError(
            f"backend = {self.settings.backend!r}: how its step can be traced is not known"
        )

    @abstractmethod
    def plugins(self, config: RunConfig, world: World) -> dict[str, Any]:
        """Return the backend's arguments of ``Accelerator``, before the model exists."""

    def plugins_for_model(self, run: Run, model: nn.Module) -> dict[str, Any]:
        """Return the backend's arguments of the ``Accelerator`` that prepares ``model``."""
        return self.plugins(run.config, run.world)

    @abstractmethod
    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel:
        """Return the model that ``accelerator`` wraps, and the optimizer for ``step``."""

    def for_evaluation(self, run: Run, model: nn.Module) -> nn.Module:
        """Return the model for a run without an optimizer."""
        return model.to(run.world.device)

    @abstractmethod
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Return the context of one micro-batch. Gradients are averaged after the ``last`` one."""

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add the gradients of the scalar ``loss``; return it detached."""
        return defaults.backward(run, loss)

    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip, step the optimizer and clear the gradients."""
        return defaults.step(run, clip)

    def gathering_modules(self, run: Run) -> Mapping[str, nn.Module]:
        """Return, by name, the modules at whose calls weights are gathered."""
        return {}

    def save(self, run: Run) -> State:
        """Return this rank's part of model and optimizer, by neutral names."""
        return defaults.save_checkpoint(run)

    def load(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Load a checkpoint of any strategy, saved at ``progress``, into model
        and optimizer; always true.
        """
        return defaults.load_checkpoint(run, state)

    def teardown(self) -> None:  # noqa: B027  # optional
        """Drop global state of the backend."""
