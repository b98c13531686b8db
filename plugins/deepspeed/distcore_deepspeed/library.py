"""The deepspeed library itself: on the accelerator that is there, quiet, and compiling nothing unasked.

The other modules take from here what they use of it, so that nothing imports DeepSpeed before the environment
variables are set which DeepSpeed reads when it is imported.
"""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from importlib import import_module
from inspect import getclosurevars
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn import functional

# Without the first DeepSpeed probes CUDA in a way that forbids forking ranks, without the second it warns of a
# machine that has no GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops import op_builder as op_builder
from deepspeed.runtime import lr_schedules as lr_schedules
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as DynamicLossScaler
from deepspeed.runtime.precision_config import DeepSpeedBF16Config as DeepSpeedBF16Config
from deepspeed.runtime.precision_config import DeepSpeedFP16Config as DeepSpeedFP16Config
from deepspeed.runtime.zero import Init as Init
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
)
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig

NO_COMPILER = "TORCHDYNAMO_DISABLE"
SHARED_MEMORY_OP = "deepspeed_shm_comm"
DECISIONS = "_PartitionedParameterCoordinator__params_to_release"
"""DeepSpeed's method that says what to let go after a module; its decorator hides that it keeps its answers."""
RENAMED = r"`torch\.distributed\.\w+` is deprecated"
"""torch's warning that a collective which DeepSpeed calls has a new name: nothing that a user can act on."""


def start(device: torch.device, debug: bool) -> tuple[int, int]:
    """Select the accelerator of ``device`` and put DeepSpeed's communication on top of torch's process group.

    Returns rank and number of ranks as DeepSpeed sees them. DeepSpeed logs errors only, or everything with ``debug``.
    """
    _set_log_level(logging.DEBUG if debug else logging.ERROR)
    import_ahead()
    warnings.filterwarnings("ignore", RENAMED, FutureWarning)
    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())
    # DeepSpeed would compile this optional collective for ranks on one machine at the start of a first run, which
    # takes 20 s and more, and would crash without a compiler. The table is replaced, not changed: reading DeepSpeed's
    # own makes it probe all its extensions with the compiler, on every rank.
    deepspeed.ops.__compatible_ops__ = {SHARED_MEMORY_OP: False}
    deepspeed.init_distributed(dist_init_required=None, verbose=False)
    return deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


def stop() -> None:
    """Forget DeepSpeed's process groups, so that another run in this process makes its own."""
    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
        setattr(deepspeed.utils.groups, name, None)
    deepspeed.comm.comm.cdb = None


class _Valueless(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed leaves it untyped
    """A CPU that has every precision: what is traced on it has no values."""

    def is_fp16_supported(self) -> bool:
        return True


def start_valueless() -> Any:
    """Start on a CPU that has every precision; return what ``stop_valueless`` needs: how the process was before."""
    before = get_accelerator(), functional.linear
    set_accelerator(_Valueless())
    start(torch.device("cpu"), debug=False)
    return before


def stop_valueless(before: Any) -> None:
    """Forget process groups, and have the process as ``before``: stage 3 has replaced torch's ``linear`` for good."""
    stop()
    accelerator, functional.linear = before
    set_accelerator(accelerator)


def limit_waiting(seconds: int) -> None:
    """Have every process group wait no longer than ``seconds``: those that DeepSpeed makes wait for half an hour."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def fp16_on_cpu() -> bool:
    """True if DeepSpeed takes fp16 on this machine's CPU."""
    return bool(CPU_Accelerator().is_fp16_supported())


def initialize(**arguments: Any) -> Any:
    """Return the engine of ``deepspeed.initialize``."""
    return deepspeed.initialize(**arguments)[0]


def follow_order(engine: Any) -> None:
    """Have stage 3 decide anew which weights to let go whenever the order changes in which modules run.

    DeepSpeed keeps these decisions for good. Those of an evaluation before the first step know of no backward pass: the
    weights of every layer would be let go after its forward pass, and be gathered one by one again.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return
    coordinator = offload.get_param_coordinator()
    invalidate, decorated = coordinator._invalidate_trace, getattr(type(coordinator), DECISIONS)
    forget = getclosurevars(decorated).nonlocals["func"].cache_clear

    def invalidate_and_forget() -> None:
        invalidate()
        forget()

    coordinator._invalidate_trace = invalidate_and_forget


def import_ahead() -> None:
    """Import what building an engine imports: called before ranks are forked, it is done once for all of them.

    The engine imports an optimizer, Muon, only to compare types with it. Muon's decorator imports all of torch's
    compiler, unless the compiler is switched off at that moment.
    """
    before = os.environ.get(NO_COMPILER)
    os.environ[NO_COMPILER] = "1"
    try:
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        os.environ.pop(NO_COMPILER)
        if before is not None:
            os.environ[NO_COMPILER] = before


def _set_log_level(level: int) -> None:
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)
