"""Peak speeds of devices: dense products of matrices, by precision; ``peaks.json`` has them,
each with its source.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from distcore import RunConfig

TABLE = Path(__file__).with_name("peaks.json")
"""TFLOP/s by the whole name that torch has for a device, a regular expression.

``half`` is in bf16, or in fp16 for a device without it; ``tf32`` is null for a
device that lacks it.
"""


def peak_of(device: torch.device, config: RunConfig) -> float | None:
    """Return the FLOP/s of a rank's device in the precision of the run; ``None`` if
    they are not known.
    """
    module: Any = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return peak_of_name(str(name(device)), config) if name else None


def peak_of_name(name: str, config: RunConfig) -> float | None:
    """Return the FLOP/s of the device of this name; ``None`` if they are not known."""
    for device in json.loads(TABLE.read_text(encoding="utf-8")):
        if not re.fullmatch(device["name"], name):
            continue
        if config.precision != "fp32":
            tflops = device["half"]
        else:
            # A device without TF32 has none in the table.
            tflops = (config.tf32 and device["tf32"]) or device["fp32"]
        return float(tflops) * 1e12
    return None
