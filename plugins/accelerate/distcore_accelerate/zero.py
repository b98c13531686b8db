"""The backend of Accelerate with DeepSpeed, with DeepSpeed's own
accumulation and division disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, InitProcessGroupKwargs
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    Memory,
    OptimizerFactory,
    PreparedModel,
    Progress,
    Run,
    RunConfig,
    SavedState,
    State,
    StepResult,
    StrategyError,
    World,
)
from distcore_accelerate.backend import Backend
from distcore_accelerate.deepspeed_config import ZERO, check_supported, user_config
from distcore_accelerate.precision import mixed_precision, move_unsharded
from distcore_accelerate.settings import Tree
from distcore_deepspeed import (
    UserConfig,
    check_evaluation,
    check_training,
    checkpoint,
    engine,
    library,
    open_values,
    own_values,
    resolve,
    traced_engine,
    zero_memory,
)

UNUSED = "the buffer that holds an unused parameter is stepped as a whole: weight decay moves it"
FP32_ONLY = "deepspeed: stage 0 in fp32 only"
GATHERS = "gathers weights inside of every layer at DeepSpeed's stage 3"
FP16 = "deepspeed: fp16 needs a GPU, or a CPU with fp16 arithmetic"


class ZeRO(Backend):
    """Shard with DeepSpeed: optimizer state, gradients from stage 2 on, and
    parameters at stage 3.
    """

    @cached_property
    def user(self) -> UserConfig:
        """The user's config of DeepSpeed, from options and files."""
        return user_config(self.options, self.settings)

    def capabilities(self) -> Capabilities:
        """Declare the capabilities of the user's stage and scheduler."""
        return Capabilities(
            spec_version=3,
            gradients=self.user.gradients,
            devices=frozenset({"cpu", "cuda"}),
            other_optimizers="elementwise",
            shards_parameters=self.user.stage == 3,
            hides_gradients=self.user.stage > 0,
            inner_gradients="none",  # the engine takes any backward pass for that of the loss
            lacks=frozenset(
                {"sparse gradients", "complex parameters", "parameters without elements"}
            ),
            why_not_phases=UNUSED,
            ema=self.user.keeps_masters,
            compiles=self.user.compiles,
            why_not_compiled=GATHERS,
            forward_cost=self.user.forward_cost,
            owns=frozenset(
                {"precision", "optimizer", *(("schedule",) if self.user.scheduler else ())}
            ),
            own_values=own_values(self.user),
            limits=(FP32_ONLY, FP16, f"deepspeed: {UNUSED}"),
            exempt={"unused-parameters": UNUSED}
            | ({"bf16": FP32_ONLY} if self.user.stage == 0 else {}),
        )

    def open_values(self, config: RunConfig) -> Mapping[str, Any]:
        """Return batch, rates and clipping from file or JSON. Without a scheduler,
        the schedule stays open.
        """
        return open_values(self.user, config, owns_schedule=False)

    def check_training(self, config: RunConfig) -> None:
        """Raise ConfigError, one line, for a config that Accelerate or
        DeepSpeed cannot train with.
        """
        check_supported(self.user)
        check_training(self.user, config)

    def check_evaluation(self, config: RunConfig) -> None:
        """Raise ConfigError, one line, for a config that DeepSpeed cannot evaluate with."""
        check_evaluation(self.user, config)

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory and the traffic of DeepSpeed at the user's stage."""
        return zero_memory(self.user, config, meta_model, ranks, make_optimizer)

    def traced(self) -> object:
        """Return a stand-in for DeepSpeed's engine. Raises ConfigError for state on NVMe."""
        return traced_engine(self.user, self.capabilities())

    def plugins(self, config: RunConfig, world: World) -> dict[str, Any]:
        """Start DeepSpeed's communication. Return its plugin with the stage only."""
        library.start(world.device, config.log_level == "debug")
        return _arguments(config, world, {ZERO: {"stage": self.user.stage}})

    def plugins_for_model(self, run: Run, model: nn.Module) -> dict[str, Any]:
        """Return DeepSpeed's plugin with the full config for ``model``."""
        return _arguments(run.config, run.world, resolve(self.user, run, model))

    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel:
        """Build DeepSpeed's engine through Accelerate.

        DeepSpeed's config may replace the optimizer.

        Raises StrategyError for a parameter without dimensions.
        """
        if scalar := next(
            (name for name, parameter in model.named_parameters() if parameter.dim() == 0), None
        ):
            raise StrategyError(f"parameter {scalar!r} has no dimension: give it the shape (1,)")
        tree: Tree = accelerator.state.deepspeed_plugin.deepspeed_config
        optimizer = _optimizer(tree, run, make_optimizer(model))
        return engine.prepare(run, model, tree, lambda: _initialize(accelerator, model, optimizer))

    def for_evaluation(self, run: Run, model: nn.Module) -> nn.Module:
        """Return the unsharded model in the precision of the run."""
        return move_unsharded(run, model)

    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Tell the engine if the next backward pass is the last of the step."""
        return engine.accumulate(run, last)

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Run the engine's backward pass.

        ``Accelerator.backward`` would also step the optimizer.
        """
        return engine.backward(run, loss)

    def gathering_modules(self, run: Run) -> Mapping[str, nn.Module]:
        """Return the modules with parameters of their own, at stage 3."""
        return engine.gathering_modules(run)

    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip and step with the engine.

        Raises LossScaleError if fp16 overflows at the smallest loss scale.
        """
        return engine.step(run, clip)

    def save(self, run: Run) -> State:
        """Return the master weights and optimizer state of this rank's partitions."""
        return checkpoint.save(run)

    def load(self, run: Run, state: SavedState, progress: Progress) -> bool:
        """Load the model, and the master weights and optimizer state of this
        rank's partitions; always true.
        """
        return checkpoint.load(run, state, progress)

    def teardown(self) -> None:
        """Drop DeepSpeed's process groups."""
        library.stop()


def _arguments(config: RunConfig, world: World, tree: Tree) -> dict[str, Any]:
    """Return the arguments of an ``Accelerator`` with DeepSpeed and the config ``tree``."""
    return {
        "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=tree, zero3_init_flag=False),
        "mixed_precision": mixed_precision(config),
        # With cpu=True Accelerate silently drops DeepSpeed; without a backend it
        # assumes one process.
        "cpu": False,
        "kwargs_handlers": [
            InitProcessGroupKwargs(backend=dist.get_default_backend_for_device(world.device))
        ],
    }


def _optimizer(tree: Tree, run: Run, optimizer: torch.optim.Optimizer) -> Any:
    """Return ``optimizer``, or Accelerate's dummy if DeepSpeed's config has an optimizer."""
    if "optimizer" not in tree:
        return optimizer
    groups = [
        {key: group[key] for key in ("params", "lr", "weight_decay")}
        for group in optimizer.param_groups
    ]
    return DummyOptim(groups, lr=run.config.lr)


def _initialize(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Any:
    try:
        prepared, _ = accelerator.prepare(model, optimizer)
    except ValueError as error:
        raise StrategyError(f"accelerate, deepspeed: {' '.join(str(error).split())}") from error
    return prepared
