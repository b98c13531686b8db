"""The deepspeed library itself: on the right accelerator, quiet, and without unwanted compilation.

DeepSpeed reads environment variables when it is imported. The other modules import it through this
one, which sets them first.
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

# Without the first variable, DeepSpeed probes CUDA in a way that forbids forking ranks. Without the
# second, it warns on a machine without a GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

try:
    import deepspeed
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}; install it with: pip install --no-build-isolation deepspeed"
    ) from error
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops import op_builder as op_builder
from deepspeed.runtime import lr_schedules as lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as DynamicLossScaler
from deepspeed.runtime.precision_config import DeepSpeedBF16Config as DeepSpeedBF16Config
from deepspeed.runtime.precision_config import DeepSpeedFP16Config as DeepSpeedFP16Config
from deepspeed.runtime.zero import Init as Init
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
)
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils import z3_leaf_module as z3_leaf_module

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_COMPILER = "TORCHDYNAMO_DISABLE"
SHARED_MEMORY_OP = "deepspeed_shm_comm"
DECISIONS = "_PartitionedParameterCoordinator__params_to_release"
"""DeepSpeed's method that decides which weights to release after a module. Its
decorator caches the answers.
"""
RENAMED = r"`torch\.distributed\.\w+` is deprecated"
"""torch's warning about old names of collectives in DeepSpeed's code, which a
user cannot act on.
"""


def start(device: torch.device, debug: bool) -> tuple[int, int]:
    """Select the accelerator of ``device``, and start DeepSpeed's communication on top
    of torch's process group.

    Returns rank and number of ranks from DeepSpeed. DeepSpeed logs errors only,
    or everything with ``debug``.
    """
    _set_log_level(logging.DEBUG if debug else logging.ERROR)
    import_before_fork()
    warnings.filterwarnings("ignore", RENAMED, FutureWarning)
    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())
    # At the start of a first run DeepSpeed would compile this optional collective for ranks on one
    # machine, which takes 20 s and more, and crash without a compiler. The table is replaced, not
    # edited: reading DeepSpeed's own table makes it probe all its extensions with the compiler, on
    # every rank.
    deepspeed.ops.__compatible_ops__ = {SHARED_MEMORY_OP: False}
    deepspeed.init_distributed(dist_init_required=None, verbose=False)
    return deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


def forget_secondary_partitions() -> None:
    """Forget the group for secondary partitions: DeepSpeed makes one per process, and
    refuses a second model's.
    """
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def stop() -> None:
    """Forget DeepSpeed's process groups, so that another run in this process makes its own."""
    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
        setattr(deepspeed.utils.groups, name, None)
    deepspeed.comm.comm.cdb = None


class _TracingAccelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed leaves it untyped
    """A CPU that claims every precision, for traces on fake tensors."""

    def is_fp16_supported(self) -> bool:
        return True


def start_tracing() -> Any:
    """Start DeepSpeed for a trace on fake tensors.

    Return the state before it, for ``stop_tracing``.
    """
    before = get_accelerator(), functional.linear
    set_accelerator(_TracingAccelerator())
    start(torch.device("cpu"), debug=False)
    return before


def stop_tracing(before: Any) -> None:
    """Forget process groups and restore the state ``before``: stage 3 replaces
    torch's ``linear`` for good.
    """
    stop()
    accelerator, functional.linear = before
    set_accelerator(accelerator)


def set_timeouts(seconds: int) -> None:
    """Set the timeout of every process group.

    DeepSpeed makes its groups with a timeout of half an hour.
    """
    # torch 2.15 has a public name for it, and warns of the old one.
    name = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"
    for group in list(distributed_c10d._world.pg_map):
        getattr(distributed_c10d, name)(timedelta(seconds=seconds), group)


def fp16_on_cpu() -> bool:
    """Return True if DeepSpeed supports fp16 on this machine's CPU."""
    return bool(CPU_Accelerator().is_fp16_supported())


def parse_config(tree: dict[str, Any]) -> None:
    """Have DeepSpeed read its config, silently. Raises whatever error DeepSpeed has for it."""
    level = logging.getLogger("DeepSpeed").level
    _set_log_level(logging.ERROR)
    try:
        DeepSpeedConfig(tree)
    finally:
        _set_log_level(level)


def initialize(**arguments: Any) -> Any:
    """Build an engine by ``deepspeed.initialize``."""
    return deepspeed.initialize(**arguments)[0]


def refresh_release_order(engine: Any) -> None:
    """Have stage 3 decide again which weights to release whenever the order of the modules changes.

    DeepSpeed caches these decisions for good. Decisions from an evaluation before the first step
    know of no backward
    pass: every layer's weights would be released after its forward pass, and be gathered
    again one by one.
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


def import_before_fork() -> None:
    """Import the modules that building an engine imports, once before ranks are forked.

    The engine imports an optimizer, Muon, only to compare types. Muon's decorator imports all of
    torch's compiler, unless the compiler is switched off at that moment.
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
