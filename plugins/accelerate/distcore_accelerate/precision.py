"""Precision for backends that own it: cast parameters in forward and backward, and
return results in fp32.
"""

from __future__ import annotations

import torch
from torch import nn

from distcore import Run, RunConfig, defaults

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(config: RunConfig) -> str:
    """Return Accelerate's name of the run's precision."""
    return "no" if config.precision == "fp32" else config.precision


def move_unsharded(run: Run, model: nn.Module) -> nn.Module:
    """Move the unsharded model to the device, in the precision of the run.

    An evaluation keeps no optimizer state.
    """
    model = model.to(device=run.world.device, dtype=DTYPES[run.config.precision])
    return results_in_fp32(run, model)


def results_in_fp32(run: Run, model: nn.Module) -> nn.Module:
    """Make the model take fp32 inputs and return fp32 results, as under autocast,
    for loss and metrics.
    """
    if run.config.precision != "fp32":
        defaults.results_in_fp32(model, DTYPES[run.config.precision])
    return model
