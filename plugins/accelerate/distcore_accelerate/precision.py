"""Precision where a backend owns it: parameters cast for forward and backward, results in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distcore import Run, RunConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(config: RunConfig) -> str:
    """The run's precision as Accelerate calls it."""
    return "no" if config.precision == "fp32" else config.precision


def whole(run: Run, model: nn.Module) -> nn.Module:
    """The whole model in the precision of the run, to be evaluated: without an optimizer there is little to shard."""
    model = model.to(device=run.world.device, dtype=DTYPES[run.config.precision])
    return results_in_fp32(run, model)


def results_in_fp32(run: Run, model: nn.Module) -> nn.Module:
    """Have loss and metrics computed from fp32, as they are under autocast."""
    if run.config.precision != "fp32":
        model.register_forward_hook(_in_fp32)
    return model


def _in_fp32(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, outputs)
