"""Precision where a backend owns it: parameters cast for forward and backward, results in fp32."""

from __future__ import annotations

import torch
from torch import nn

from distcore import Run, RunConfig, defaults

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(config: RunConfig) -> str:
    """The run's precision as Accelerate calls it."""
    return "no" if config.precision == "fp32" else config.precision


def unsharded(run: Run, model: nn.Module) -> nn.Module:
    """Return the whole model in the precision of the run, to be evaluated: without an optimizer it is small."""
    model = model.to(device=run.world.device, dtype=DTYPES[run.config.precision])
    return results_in_fp32(run, model)


def results_in_fp32(run: Run, model: nn.Module) -> nn.Module:
    """Have loss and metrics computed from fp32, as they are under autocast."""
    if run.config.precision != "fp32":
        defaults.results_in_fp32(model)
    return model
