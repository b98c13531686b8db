"""Emulate Horovod's memory on fake tensors, for the traced steps of ``distcore plan``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    OptimizerFactory,
    PreparedModel,
    Run,
    StepResult,
    defaults,
    hookimpl,
)


class TracedFusion:
    """A stand-in that allocates Horovod's fusion buffer, and the half-precision copies of
    gradients during a step.
    """

    capabilities: ClassVar = Capabilities(spec_version=3, devices=frozenset({"cpu", "cuda"}))

    def __init__(self, fusion_bytes: int, halves: bool) -> None:
        """``halves``: gradients are sent in half precision, as copies that live until
        all have come back.
        """
        self._fusion_bytes = fusion_bytes
        self._halves = halves
        self._buffer: Tensor | None = None

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Make the fusion buffer, which a single rank does not need."""
        if run.world.size > 1:
            self._buffer = torch.empty(self._fusion_bytes, dtype=torch.uint8)
        return PreparedModel(
            model=model, optimizer=make_optimizer(model) if make_optimizer else None
        )

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Emulate the exchange of gradients, then step."""
        if self._halves:
            halves = {}
            for parameter in run.module.parameters():
                if parameter.grad is not None:
                    halves[parameter] = parameter.grad.half()
            # All halves are in memory at once, as in the exchange.
            for parameter, half in halves.items():
                parameter.grad = half.to(parameter.dtype)
            del halves
        return defaults.step(run, clip)
