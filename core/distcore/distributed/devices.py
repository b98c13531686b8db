"""The device of a rank, its type-specific properties, and the machine's devices.

No module but this one and ``arithmetic`` names a device type.

``torch.accelerator`` gives the accelerator's type. Seeds, bf16 and memory statistics come from
torch's module for the type, ``torch.get_device_module``. Other device types have torch's common
behavior.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distcore.config import RunConfig
from distcore.errors import ConfigError, StrategyError
from distcore.plugin.strategy.contract import RankInfo

FUSED = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Kinds of device for which torch has fused optimizers."""
JAGGED = frozenset({"cuda"})
"""Kinds of device for which torch's attention takes nested tensors of layout ``torch.jagged``."""
UNPINNED = frozenset({"auto", "cpu", "mps"})
"""Values of ``device`` without use for pinned memory: they compute in main memory."""
COLLECTIVES = ("gloo:", "nccl:", "ncclKernel", "ncclDevKernel", "xccl:", "hccl:")
"""How the names of communication events begin in torch's traces, by backend."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables for the network interface of a backend."""
MIXED = re.compile(
    r"on the same device|either on cpu or on the same device|Input type \(torch\.|"
    r"Expected a '\w+' device type for generator|No backend type associated with device|"
    r"Tensors must be CUDA|Placeholder storage has not been allocated"
)
"""How torch, and its backends, say that tensors are not all on one device."""


def resolve_device(config: RunConfig, elsewhere: bool = False) -> str:
    """Return the type of device that ``config.device`` means: ``cpu``, or an accelerator here.

    With ``elsewhere`` it need not be here. Raises ConfigError, one line, for a type that torch does
    not know or does not see.
    """
    wanted = config.device
    if wanted == "auto":
        return _accelerator_type() or "cpu"
    if wanted == "cpu":
        return wanted
    accelerator = _accelerator_type()
    here = f"cpu or {accelerator}" if accelerator else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(
            f"device = {wanted!r}: torch knows no such device type (here: {here})"
        ) from None
    if device.index is not None:
        raise ConfigError(
            f"device = {wanted!r}: expected a device type, {device.type!r}; each rank takes its own"
        )
    if not elsewhere and not count_devices(wanted):
        raise ConfigError(
            f"device = {wanted!r}: torch sees no such device here (here: {here}); use --device cpu,"
            " or leave it out"
        )
    return wanted


def _accelerator_type() -> str | None:
    """Return the type of this machine's accelerator; ``None`` if torch sees no device of it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not count_devices(accelerator.type):
        return None
    return accelerator.type


def count_devices(device_type: str) -> int:
    """Return the number of devices of an accelerator type.

    Avoids a context on the devices if possible, because ranks may be forked from this process.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    module: Any = getattr(torch, device_type, None)
    if not hasattr(module, "device_count") or not getattr(module, "is_available", lambda: True)():
        return 0
    return int(module.device_count())


def count_accelerators() -> int:
    """Return the number of devices of this machine's accelerator; 0 without an accelerator."""
    device_type = _accelerator_type()
    return count_devices(device_type) if device_type else 0


def device_of(config: RunConfig, rank_info: RankInfo) -> torch.device:
    """Make this rank's device current and return it: the CPU, or accelerator ``local_rank``.

    It is number 0 where a process sees only one, as under a launcher that gives each task its own.
    Raises ConfigError for more ranks than devices, and for bf16 on a device without its arithmetic.
    """
    device_type = resolve_device(config)
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, _index(device_type, rank_info.local_rank))
    if device_type == torch._C._get_privateuse1_backend_name():
        # Otherwise ``model.to`` unties tied weights.
        torch.__future__.set_swap_module_params_on_conversion(True)
    module = torch.get_device_module(device)
    if hasattr(module, "set_device"):  # not where there is never more than one
        module.set_device(device)
    if "bf16" in (config.precision, config.eval_precision) and not _computes_bf16(module):
        # Not before: asking creates a context, which does not survive a fork.
        name = module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)
        raise ConfigError(
            f"precision = 'bf16': {name} has no bfloat16 arithmetic; use fp16 or fp32"
        )
    return device


def _index(device_type: str, local_rank: int) -> int:
    """Return the number of this rank's device; raises ConfigError if there is none for it."""
    count = count_devices(device_type)
    if count == 1:
        return 0
    if local_rank >= count:
        raise ConfigError(
            f"device = {device_type!r}: local rank {local_rank} has none, torch sees {count} here;"
            f" start no more than {count} ranks on each machine"
        )
    return local_rank


def _computes_bf16(module: Any) -> bool:
    """Return False if the module of the current device lacks bfloat16, or only emulates it."""
    ask = getattr(module, "is_bf16_supported", None)
    if ask is None:
        return True
    try:
        return bool(ask(including_emulation=False))
    except TypeError:  # a device type that emulates nothing
        return bool(ask())


def has_fast_bf16() -> bool:
    """Return True if this CPU multiplies bfloat16 matrices in hardware; others do it slowly."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def has_jagged_attention(device: torch.device) -> bool:
    """Return True if torch has attention kernels for rows of different lengths on this device."""
    return device.type in JAGGED


def backend_of(device: torch.device) -> str:
    """Return torch's process-group backend for a device: ``gloo`` for the CPU.

    Raises StrategyError if there is none.
    """
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        raise StrategyError(
            f"device = {device.type!r}: torch names no process-group backend for it; use --strategy"
            " single, or --device cpu"
        ) from None


def seed(device: torch.device, number: int) -> None:
    """Seed torch's generators of the CPU and of the current ``device``."""
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


_EARLIER_PEAKS: dict[str, int] = {}
"""By type of device: a peak from before the last ``reset_peak``, in bytes. In the module, because
the counter that ``reset_peak`` resets is one for the process.
"""


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on ``device``, or of the process.

    It is that of the process where torch does not count tensors.
    """
    count = _memory_function(device, "max_memory_allocated")
    peak = _peak_of_process() if count is None else int(count(device))
    return max(peak, _EARLIER_PEAKS.get(device.type, 0))


def reset_peak(device: torch.device, earlier: int) -> None:
    """Let ``peak_memory`` begin anew from ``earlier`` bytes, where device or system can do that."""
    reset = _memory_function(device, "reset_peak_memory_stats")
    if reset is not None:
        reset(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):  # not Linux
            Path("/proc/self/clear_refs").write_text("5")
    _EARLIER_PEAKS[device.type] = earlier


def held_memory(device: torch.device) -> int:
    """Return the memory that is in use now, in bytes, of what ``peak_memory`` is the peak of."""
    count = _memory_function(device, "memory_allocated")
    return int(psutil.Process().memory_info().rss if count is None else count(device))


def free_memory(device: torch.device) -> int:
    """Return the free memory of ``device`` in bytes, or the machine's where torch has no figure."""
    get_info = _memory_function(device, "mem_get_info")
    return int(psutil.virtual_memory().available if get_info is None else get_info(device)[0])


def _memory_function(device: torch.device, name: str) -> Any:
    """Return a function of torch's module for the device; ``None`` for the CPU, and without it."""
    if device.type == "cpu":
        return None
    return getattr(torch.get_device_module(device), name, None)


def _peak_of_process() -> int:
    """Return the peak of the memory of this process, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def why_not_fork() -> str | None:
    """Return in a few words why a forked child cannot use the accelerator; ``None`` if it can.

    Once a process has used the CUDA driver, its forked children find no GPU. ``count_devices``
    counts GPUs without the driver. Other accelerators are not known to survive a fork.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    if accelerator.type != "cuda":
        return f"forked processes cannot use {accelerator.type!r}"
    used = torch.cuda.is_initialized() or _driver_in_use()  # type: ignore[no-untyped-call]
    return "this process has used the GPU" if used else None


def _driver_in_use() -> bool:
    """Return True if cuInit was called here: it keeps a device file open, and NVML does not."""
    with contextlib.suppress(OSError):  # not Linux
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link) == "/dev/nvidia-uvm":
                    return True
    return False


def memory_overhead(device_type: str) -> dict[str, str]:
    """Return the memory that a device needs in addition to tensors: name to size and source."""
    if device_type != "cuda":
        return {}
    return {
        "CUDA context": (
            "depends on GPU, driver and loaded kernels, nvidia-smi shows it; 1.3 GB in an example"
            " of Hugging Face's (Transformers, Model training anatomy)"
        ),
        "cuBLAS workspaces": (
            "8.1 MiB for each stream that multiplies matrices, 32 MiB on Hopper (torch, "
            "CublasHandlePool.cpp)"
        ),
        "NCCL buffers": (
            "not known in all; NCCL_BUFFSIZE, 4 MiB, for each pair of GPUs (NCCL's manual,"
            " Environment Variables)"
        ),
        "fragmentation": (
            "not known; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lessens it (torch's"
            " manual, CUDA semantics)"
        ),
    }
