"""Peak speeds of devices, by the data sheets of their makers: dense products of matrices, by precision."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from distcore import RunConfig


class Peak(NamedTuple):
    """TFLOP/s of a device; ``None`` for a precision that it lacks."""

    half: float
    """In bf16; of a device without it, in fp16."""
    tf32: float | None
    """In TF32 where a product in fp32 may use it."""
    fp32: float
    """In fp32."""


PEAKS = {
    "NVIDIA H200": Peak(989.5, 494.7, 67.0),  # NVIDIA H200 Tensor Core GPU data sheet, without sparsity
    "NVIDIA H100 PCIe": Peak(756.0, 378.0, 51.0),  # NVIDIA H100 Tensor Core GPU data sheet, without sparsity
    "NVIDIA H100 80GB HBM3": Peak(989.5, 494.7, 67.0),  # the same, SXM
    r"NVIDIA A100.*": Peak(312.0, 156.0, 19.5),  # NVIDIA A100 Tensor Core GPU data sheet
    "NVIDIA L40S": Peak(362.0, 183.0, 91.6),  # NVIDIA L40S data sheet, without sparsity
    "NVIDIA L4": Peak(121.0, 60.0, 30.3),  # NVIDIA L4 data sheet, without sparsity
    r"Tesla V100-SXM.*": Peak(125.0, None, 15.7),  # NVIDIA V100 data sheet, SXM2, fp16
    "Tesla T4": Peak(65.0, None, 8.1),  # NVIDIA T4 data sheet, fp16
    r"AMD Instinct MI300X.*": Peak(1307.4, 653.7, 163.4),  # AMD Instinct MI300X data sheet, without sparsity
}
"""By the whole name that torch has for a device, as a regular expression."""


def peak_of(device: torch.device, config: RunConfig) -> float | None:
    """Return the FLOP/s of a rank's device in the precision of the run; ``None`` if they are not known."""
    module: Any = torch.get_device_module(device)
    named = getattr(module, "get_device_name", None)
    return peak_of_name(str(named(device)), config) if named else None


def peak_of_name(name: str, config: RunConfig) -> float | None:
    """Return the FLOP/s of the device of this name."""
    known = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
    if known is None:
        return None
    if config.precision != "fp32":
        return known.half * 1e12
    return (known.tf32 if config.tf32 and known.tf32 else known.fp32) * 1e12
