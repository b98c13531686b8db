"""Accelerate itself: an ``Accelerator`` over the ranks that are there, and whether it is what was asked for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn

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
)
from distcore_accelerate.settings import Settings

if TYPE_CHECKING:
    from distcore_accelerate.strategy import AccelerateStrategy

OWN_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""What ``accelerate launch`` sets and the settings have read: Accelerate must not read it a second time."""


class Backend(Protocol):
    """One of Accelerate's ways to spread a model: what it declares, and its part of the hooks of the same names."""

    def capabilities(self, options: AccelerateStrategy) -> Capabilities: ...

    def plugins(
        self, options: AccelerateStrategy, config: RunConfig, world: World, total_steps: int | None
    ) -> dict[str, Any]:
        """Arguments that make an ``Accelerator`` this backend; ``total_steps`` is ``None`` before there is a run."""
        ...

    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel: ...

    def for_evaluation(self, run: Run, model: nn.Module) -> nn.Module: ...

    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]: ...

    def backward(self, run: Run, loss: Tensor) -> Tensor: ...

    def step(self, run: Run, clip: Clip) -> StepResult: ...

    def save(self, run: Run) -> State: ...

    def load(self, run: Run, state: SavedState) -> bool: ...

    def leave(self) -> None:
        """Forget what the backend keeps beside the process group."""
        ...


@contextmanager
def surroundings(world: World) -> Iterator[None]:
    """The environment that Accelerate is to see, for a while: the place of this rank, and no wishes but ours."""
    kept = dict(os.environ)
    for name in kept:
        if name.startswith(OWN_VARIABLES):
            del os.environ[name]
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.local_rank))
    # Else Accelerate sets the number of threads, and says so.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def new_accelerator(settings: Settings, world: World, arguments: dict[str, Any]) -> Accelerator:
    """Return a fresh ``Accelerator`` for this run; to be called within ``surroundings``, the ranks having met.

    It divides nothing (one accumulation step), steps no schedule, and casts nothing unless ``arguments`` say so.
    """
    forget()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    ours: dict[str, Any] = {"mixed_precision": "no", "cpu": world.device.type == "cpu"}
    accelerator = Accelerator(gradient_accumulation_steps=1, step_scheduler_with_optimizer=False, **(ours | arguments))
    compare(settings, world, accelerator)
    return accelerator


def forget() -> None:
    """Drop Accelerate's singletons, which would carry one run's settings into the next; its ranks stay."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if "transformers.integrations.deepspeed" in sys.modules:  # else models are built in pieces that we do not know
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()


def compare(settings: Settings, world: World, accelerator: Accelerator) -> None:
    """Raise StrategyError, one line, unless Accelerate is what was asked for: it falls back without a word."""
    expected = {
        "ddp": DistributedType.MULTI_GPU if world.device.type == "cuda" else DistributedType.MULTI_CPU,
        "fsdp2": DistributedType.FSDP,
        "deepspeed": DistributedType.DEEPSPEED,
    }[settings.backend]
    asked = (expected.value, world.size, world.device.type)
    found = (accelerator.distributed_type.value, accelerator.num_processes, accelerator.device.type)
    if found != asked:
        raise StrategyError(
            f"accelerate fell back: {settings.backend} was asked for ({asked[0]} on {asked[1]} rank(s), {asked[2]}), "
            f"Accelerate reports {found[0]} on {found[1]} rank(s), {found[2]}"
        )


def world_of(accelerator: Accelerator) -> World:
    """The world as Accelerate reports it."""
    return World(
        rank=accelerator.process_index,
        size=accelerator.num_processes,
        local_rank=accelerator.local_process_index,
        device=accelerator.device,
    )


def state_of_one() -> None:
    """Give Accelerate's logging the state that it insists on, where another strategy than this one runs."""
    if not PartialState._shared_state:
        with surroundings(World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))):
            del os.environ["LOCAL_RANK"]  # else it would look for other ranks
            PartialState(cpu=True)
