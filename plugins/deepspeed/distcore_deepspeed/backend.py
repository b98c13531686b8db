"""DeepSpeed itself: imported quietly, on the accelerator that is there, with nothing compiled behind one's back."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch.distributed import distributed_c10d

# DeepSpeed looks at both when it is imported: without the first it probes CUDA in a way that forbids forking ranks,
# without the second it warns of a machine that has no GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.accelerator import get_accelerator, set_accelerator

NO_COMPILER = "TORCHDYNAMO_DISABLE"
SHARED_MEMORY_OP = "deepspeed_shm_comm"


RENAMED = r"`torch\.distributed\.\w+` is deprecated"
"""torch's warning that a collective which DeepSpeed calls has a new name: nothing that a user can act on."""


def prepare(device: torch.device, debug: bool) -> None:
    """Select the accelerator of ``device`` and keep DeepSpeed's log to what goes wrong; before any other call."""
    _quiet(debug)
    import_ahead()
    warnings.filterwarnings("ignore", RENAMED, FutureWarning)
    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    # An optional collective for ranks on one machine, which DeepSpeed would compile (20 s and more) at the start of a
    # first run, and crash without a compiler. A table of our own: to see DeepSpeed's is to have it probe all its
    # extensions with the compiler, on every rank.
    deepspeed.ops.__compatible_ops__ = {SHARED_MEMORY_OP: False}


def join_comm() -> tuple[int, int]:
    """Put DeepSpeed's communication on top of torch's process group; return rank and size as DeepSpeed sees them."""
    deepspeed.init_distributed(dist_init_required=None, verbose=False)
    return deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


def leave_comm() -> None:
    """Forget the process groups, so that another run in this process makes its own."""
    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
        setattr(deepspeed.utils.groups, name, None)
    deepspeed.comm.comm.cdb = None


def limit_waiting(seconds: int) -> None:
    """Have every process group wait no longer than this: DeepSpeed makes its own, with torch's half hour."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def fp16_on_cpu() -> bool:
    """True if this DeepSpeed takes fp16 on a CPU."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return bool(CPU_Accelerator().is_fp16_supported())


def initialize(**arguments: Any) -> Any:
    """Return the engine of ``deepspeed.initialize``."""
    return deepspeed.initialize(**arguments)[0]


def import_ahead() -> None:
    """Import what building an engine imports; where ranks are forked, once for all of them.

    Among it is an optimizer that nobody uses here, of which the engine only wants the type, and which imports all of
    torch's compiler when it is decorated: without it, unless the compiler is off for that moment.
    """
    before = os.environ.get(NO_COMPILER)
    os.environ[NO_COMPILER] = "1"
    try:
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        os.environ.pop(NO_COMPILER)
        if before is not None:
            os.environ[NO_COMPILER] = before


def _quiet(debug: bool) -> None:
    logger = logging.getLogger("DeepSpeed")
    level = logging.DEBUG if debug else logging.ERROR
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)
