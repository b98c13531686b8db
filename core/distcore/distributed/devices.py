"""Which device a rank uses, and what the machine offers."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from pathlib import Path

import torch

from distcore.config import RunConfig
from distcore.errors import ConfigError
from distcore.plugin.contract import RankInfo


def resolve_device(config: RunConfig) -> str:
    """Return ``cpu`` or ``cuda`` for ``config.device``; raises ConfigError for ``cuda`` on a machine without a GPU."""
    found = count_gpus()
    if config.device == "cuda" and not found:
        raise ConfigError("device = 'cuda': torch sees no GPU here; use --set device=cpu, or leave it out")
    return config.device if config.device != "auto" else ("cuda" if found else "cpu")


def count_gpus() -> int:
    """Return the number of GPUs, without creating a CUDA context: ranks may be forked from this process."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1: by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_quota())))


def cgroup_quota(root: Path = Path("/")) -> float:
    """Return how many cores the cgroup of this process may use at a time; infinite where there is no limit.

    ``root`` stands for the file system. Reads version 2, and of version 1 what a container sees.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError):  # not Linux, or not mounted
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        for group in (Path(own), *Path(own).parents):  # a limit holds for all groups below
            with contextlib.suppress(OSError):
                quotas.append(_cores(*(root / "sys/fs/cgroup" / group / "cpu.max").read_text().split()))
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quotas.append(_cores(*((root / "sys/fs/cgroup/cpu" / name).read_text().strip() for name in names)))
    return min(quotas)


def _cores(quota: str, period: str) -> float:
    """Return the cores of a quota in microseconds of computing per period; ``max`` and -1 stand for no limit."""
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def has_fast_bf16() -> bool:
    """Return True if this CPU multiplies bfloat16 matrices in hardware; on others bf16 is slower than fp32."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def device_of(config: RunConfig, rank_info: RankInfo) -> torch.device:
    """Return this rank's device, the CPU or GPU number ``local_rank``, and make that GPU the current one.

    Raises ConfigError for bf16 on a GPU without bfloat16 arithmetic.
    """
    if resolve_device(config) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    if config.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(
            device
        )  # not before: asking creates a CUDA context, which does not survive a fork
        raise ConfigError(f"precision = 'bf16': {name} has no bfloat16 arithmetic; use fp16 or fp32")
    return device


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: of tensors on the GPU, or of the whole process if it runs on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
