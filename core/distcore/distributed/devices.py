"""Which device belongs to a rank."""

from __future__ import annotations

import os

import torch

from distcore.config import RunConfig
from distcore.errors import ConfigError
from distcore.plugin.contract import RankInfo


def resolve_device(config: RunConfig) -> str:
    """Return ``cpu`` or ``cuda`` for ``config.device``; raises ConfigError where CUDA was asked for in vain."""
    found = count_gpus()
    if config.device == "cuda" and not found:
        raise ConfigError("device = 'cuda': torch sees no GPU here; use --set device=cpu, or leave it out")
    return config.device if config.device != "auto" else ("cuda" if found else "cpu")


def count_gpus() -> int:
    """Number of GPUs, asked without making a CUDA context: ranks may be forked from this process."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def available_cores() -> int:
    """Number of CPU cores that this process may run on, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_fast_bf16() -> bool:
    """True if this CPU multiplies bfloat16 matrices in hardware; elsewhere they are slower than in fp32."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def device_of(config: RunConfig, rank_info: RankInfo) -> torch.device:
    """Return this rank's own device: GPU number ``local_rank``, or the CPU; makes that GPU the current one."""
    if resolve_device(config) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    if config.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)  # asked here: it takes a CUDA context, which no fork survives
        raise ConfigError(f"precision = 'bf16': {name} has no bfloat16 arithmetic; use fp16 or fp32")
    return device
