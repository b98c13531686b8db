"""Make Accelerate's ``Accelerator`` over existing ranks, and check that it did not fall back."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from distcore import StrategyError, World
from distcore_accelerate.settings import Settings

LAUNCHER_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Prefixes of the variables of ``accelerate launch``, already read by
``Settings``; hidden from Accelerate.
"""


@contextmanager
def rank_environment(world: World) -> Iterator[None]:
    """Set torchrun's variables of a rank, and hide those of ``accelerate launch``."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(LAUNCHER_VARIABLES):
            del os.environ[name]
    os.environ["RANK"] = str(world.rank)
    os.environ["WORLD_SIZE"] = str(world.size)
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    # Without it Accelerate sets the number of threads, and prints a message.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def new_accelerator(settings: Settings, world: World, arguments: dict[str, Any]) -> Accelerator:
    """Return a new ``Accelerator``. Call inside ``rank_environment``, with a process group.

    It does not divide the loss (one accumulation step), steps no schedule, and casts nothing unless
    ``arguments`` say so. Raises StrategyError, one line, if Accelerate fell back to another backend
    or world.
    """
    reset_state()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    own: dict[str, Any] = {"mixed_precision": "no", "cpu": world.device.type == "cpu"}
    accelerator = Accelerator(
        gradient_accumulation_steps=1, step_scheduler_with_optimizer=False, **(own | arguments)
    )
    check_no_fallback(settings, world, accelerator)
    return accelerator


def reset_state() -> None:
    """Reset Accelerate's singletons, which would carry settings into the next run.

    The process group stays.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # else transformers builds models sharded
    if "transformers.integrations.deepspeed" in sys.modules:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()


def check_no_fallback(settings: Settings, world: World, accelerator: Accelerator) -> None:
    """Raise StrategyError, one line, unless Accelerate has the requested form.

    It falls back silently.
    """
    expected = {
        "ddp": (
            DistributedType.MULTI_GPU if world.device.type == "cuda" else DistributedType.MULTI_CPU
        ),
        "fsdp2": DistributedType.FSDP,
        "deepspeed": DistributedType.DEEPSPEED,
    }[settings.backend]
    asked = (expected.value, world.size, world.device.type)
    actual = (
        accelerator.distributed_type.value,
        accelerator.num_processes,
        accelerator.device.type,
    )
    if actual != asked:
        raise StrategyError(
            f"accelerate fell back: {settings.backend} was asked for ({asked[0]} on {asked[1]}"
            f" rank(s), {asked[2]}), Accelerate reports {actual[0]} on {actual[1]} rank(s),"
            f" {actual[2]}"
        )


def world_of(joined: World, accelerator: Accelerator) -> World:
    """Return the ``joined`` world with the ranks and the device that Accelerate reports."""
    return replace(
        joined,
        rank=accelerator.process_index,
        size=accelerator.num_processes,
        local_rank=accelerator.local_process_index,
        device=accelerator.device,
    )


def ensure_state() -> None:
    """Create the state that Accelerate's logging needs, for trackers under another strategy."""
    if PartialState._shared_state:
        return
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    with rank_environment(alone):
        # With it, Accelerate would look for other ranks.
        del os.environ["LOCAL_RANK"]
        PartialState(cpu=True)
