"""A step on tensors without values, made as the loop makes one: for tools that measure what a
step holds or computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore.engine.build import new_run
from distcore.engine.fake_tensors import FakeTensors
from distcore.engine.frozen import consulting, frozen_source, hold_frozen
from distcore.engine.loop import Step, train_step
from distcore.engine.mode import set_mode
from distcore.engine.precision import autocast_for
from distcore.engine.shares import Shares
from distcore.errors import ConfigError
from distcore.model.model_source import enable_recomputation
from distcore.model.optim import optimizer_factory
from distcore.model.row_dropout import POOL_VALUES
from distcore.plugin.batching.columns import ConstantColumn
from distcore.plugin.strategy.contract import MicroBatch, Run, StepLoss, World
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.bound import BoundTask
from distcore.plugin.task.frozen import INITIAL
from distcore.plugin.task.task import Batch, Datasets, Task
from distcore.resolve.padding_free import set_padding_free

__all__ = [
    "FakeTensors",
    "StepToTrace",
    "TracedStep",
    "fake_ranks",
    "frozen_meta_models",
    "trace_step",
]
"""The names that any distribution may import."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepToTrace:
    """A job, and a micro-batch that stands for all of a step."""

    config: RunConfig
    """Resolved."""
    task: Task
    """Its ``loss`` is traced."""
    meta_model: nn.Module
    """On the meta device, frozen parameters without ``requires_grad``."""
    frozen: Mapping[str, nn.Module | None]
    """The task's frozen models, as ``frozen_meta_models`` returns them."""
    batch: Batch
    """The micro-batch, collated, on the CPU."""
    rows: int
    """How many rows it has."""
    micro_batches: int = 1
    """How many of these a step has."""
    ranks: int = 1
    """How many ranks share the work, of which the traced one is the first."""
    training: bool = True
    """False: there is no optimizer, so that passes can be traced and no step of an optimizer."""


def frozen_meta_models(
    config: RunConfig, task: Task, data: Datasets
) -> dict[str, nn.Module | None]:
    """Return the frozen models of a task on the meta device, by name; ``None`` for the trained
    model without its adapter.

    Raises MetaModelError if one cannot be built without values.
    """
    bound = BoundTask.wrap(task)
    has_adapter = config.lora.rank is not None
    return {
        name: (
            None
            if given == INITIAL and has_adapter
            else frozen_source(config, bound, data, given).meta_model()
        )
        for name, given in bound.frozen(config, data).items()
    }


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Be the first of ``size`` ranks, whose collectives return at once and send nothing.

    Raises ConfigError if this process has a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            "the program has made a process group; call destroy_process_group() before"
        )
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace_step(
    job: StepToTrace, hooks: Hooks, tensors: FakeTensors, measure: Callable[[TracedStep], T]
) -> T:
    """Build the model of ``job`` without values, as a run does, and return what ``measure`` makes
    of its step.

    ``tensors`` sees each operation, and extensions of ``hooks`` hear of each pass. A strategy that
    needs a process group is traced inside of ``fake_ranks``.
    """
    module = tensors.without_values(job.meta_model)
    with tensors.tracing():
        return measure(TracedStep(job, hooks, tensors, module))


class TracedStep:
    """A step that ``trace_step`` has prepared: its caller runs passes and the optimizer's step."""

    run: Run
    """The run, with the model as the strategy has it."""
    frozen: list[nn.Module]
    """The task's frozen models."""
    mask_pools: list[Tensor]
    """The pools of dropout masks by row, one for each probability."""

    def __init__(
        self, job: StepToTrace, hooks: Hooks, tensors: FakeTensors, module: nn.Module
    ) -> None:
        self._job = job
        self._hooks = hooks
        self._task = BoundTask.wrap(job.task)
        self.run = _wrapped(job, hooks, module)
        self.frozen = []
        self._add_frozen(tensors)
        self.mask_pools = _mask_pools(job.config, module)

    def passes(self) -> None:
        """Run forward and backward over the micro-batches, as the loop does.

        All between the first and the last are alike, so no more than three are run.
        """
        number = min(3, self._job.micro_batches)
        rows = np.zeros(self._job.rows, np.int64)
        micros = []
        for index in range(number):
            micro = MicroBatch(indices=rows, last=index == number - 1)
            micros.append((micro, self._job.batch))
        train_step(self._hooks, self.run, micros, _unscaled_loss(self.run, self._task))

    def apply(self) -> None:
        """Let the strategy step the optimizer."""
        self._hooks.step(self.run, self._job.config.clip)

    def fill_optimizer(self) -> None:
        """Make the optimizer's state, as its first step would; all gradients are cleared."""
        optimizer = self.run.optimizer
        assert optimizer is not None  # a job that trains
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    def _add_frozen(self, tensors: FakeTensors) -> None:
        """Prepare the task's frozen models, and have batches consult them."""
        if not self._job.frozen:
            return
        models: dict[str, nn.Module] = {}
        for name, meta_model in self._job.frozen.items():
            if meta_model is not None:
                module = tensors.without_values(meta_model).requires_grad_(False)
                models[name] = hold_frozen(self.run, self._hooks, module)
                self.frozen.append(module)
        of_base = [name for name in self._job.frozen if name not in models]
        self.run = consulting(self.run, self._task, models, of_base)


def _wrapped(job: StepToTrace, hooks: Hooks, module: nn.Module) -> Run:
    """Return the run with its model as the strategy has it, ready to step."""
    config = job.config
    if config.gradient_checkpointing:
        enable_recomputation(module)
    world = World(
        rank=0,
        size=job.ranks,
        local_rank=0,
        device=torch.device("cpu"),
        shard=0,
        shards=max(1, job.ranks // hooks.capabilities.ranks_per_shard),
    )
    # A loss scaler reads values to see whether gradients overflowed.
    run = replace(new_run(config, hooks, world, job.task, module), scaler=None)
    prepared = hooks.wrap_model(run, module, optimizer_factory(config) if job.training else None)
    set_padding_free(config, job.task, module)
    run = replace(
        run, model=prepared.model, optimizer=prepared.optimizer, strategy_state=prepared.state
    )
    set_mode(run, training=True)
    return run


def _mask_pools(config: RunConfig, module: nn.Module) -> list[Tensor]:
    """Return the pools of dropout masks by row, which live for the whole step."""
    if config.dropout_masks != "row":
        return []
    rates = {part.p for part in module.modules() if isinstance(part, nn.Dropout)}
    return [torch.empty(POOL_VALUES) for rate in rates if rate > 0]


def _unscaled_loss(run: Run, task: BoundTask) -> StepLoss:
    """Return the loss of a micro-batch as a step computes it, with scale 1 for it and
    for each additional term.
    """
    one_item_per_row = ConstantColumn(1, 1)
    terms = dict.fromkeys(task.logs, (1.0, one_item_per_row))
    shares = Shares(items=1, scale=1.0, terms=terms)
    autocast = autocast_for(run.config, run.capabilities, run.world)
    step = Step(run, [], shares, _no_passes, autocast, masks=None)
    return step.scaled(task.losses.unlogged)


def _no_passes(*_: object) -> Tensor:
    raise AssertionError("a step that is traced has no micro-batches")
