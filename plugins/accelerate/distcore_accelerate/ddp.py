"""Accelerate's DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcore import (
    Capabilities,
    Clip,
    OptimizerFactory,
    PreparedModel,
    Run,
    RunConfig,
    SavedState,
    State,
    StepResult,
    StrategyError,
    World,
    defaults,
    has_state_in_buffers,
    lay_out_gradients,
)

if TYPE_CHECKING:
    from distcore_accelerate.strategy import AccelerateStrategy

_NOTHING = nullcontext()


class Replicated:
    """The model whole on every rank; precision, clipping and checkpoints are the core's."""

    def capabilities(self, options: AccelerateStrategy) -> Capabilities:
        exempt = {"unused-parameters": "needs strategy_options.find_unused=true"}
        return Capabilities(
            spec_version=2,
            collectives_per_step=3 if options.find_unused else 2,
            exempt={} if options.find_unused else exempt,
        )

    def plugins(
        self, options: AccelerateStrategy, config: RunConfig, world: World, total_steps: int | None
    ) -> dict[str, Any]:
        handler = DistributedDataParallelKwargs(
            bucket_cap_mb=options.bucket_mb,
            find_unused_parameters=options.find_unused,
            gradient_as_bucket_view=True,
        )
        return {"kwargs_handlers": [handler]}

    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel:
        """The optimizer is not prepared: what Accelerate's wrapper adds to it, the core does."""
        prepared = accelerator.prepare_model(model)
        if not isinstance(prepared, DistributedDataParallel):
            raise StrategyError(f"accelerate fell back: ddp was asked for, the model is a {type(prepared).__name__}")
        prepared.broadcast_buffers = has_state_in_buffers(model)
        if not prepared.find_unused_parameters:  # with it nothing moves
            lay_out_gradients(prepared, prepared.module)
        return PreparedModel(model=prepared, optimizer=make_optimizer(model))

    def for_evaluation(self, run: Run, model: nn.Module) -> nn.Module:
        return model.to(run.world.device)

    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        return _NOTHING if last else cast(DistributedDataParallel, run.model).no_sync()

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        return defaults.backward(run, loss)

    def step(self, run: Run, clip: Clip) -> StepResult:
        return defaults.step(run, clip)

    def save(self, run: Run) -> State:
        return defaults.save_checkpoint(run)

    def load(self, run: Run, state: SavedState) -> bool:
        return defaults.load_checkpoint(run, state)

    def leave(self) -> None:
        """There is nothing beside the process group."""
