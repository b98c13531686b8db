"""Dropout on a CPU: torch draws a number of its generator for each value there, this one for four values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distcore.config import RunConfig

BITS = 16
"""Random bits for each value: the probability is rounded to a multiple of 2**-16."""


class DrawnDropout(nn.Dropout):
    """Dropout whose mask takes less of torch's generator of the CPU, and so less time; repeats by seed all the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` with some values 0 and the others larger, so that the mean is that of ``input``."""
        is_plain = type(input) is Tensor and input.device.type == "cpu" and input.is_floating_point()
        dropped = round(self.p * 2**BITS)
        if not (self.training and is_plain and input.numel() and 0 < dropped < 2**BITS) or self.inplace:
            return super().forward(input)
        return input * _kept(input, dropped).mul_(2**BITS / (2**BITS - dropped))


def _kept(like: Tensor, dropped: int) -> Tensor:
    """Return 0 for ``dropped`` of 2**16 values and 1 for the others, in shape and dtype of ``like``."""
    count = like.numel()
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits of each
    values = drawn.view(torch.int16)[:count].view(like.shape)
    return torch.ge(values, dropped - 2 ** (BITS - 1), out=torch.empty(like.shape, dtype=like.dtype))


def draw_cheaply(config: RunConfig, module: nn.Module) -> None:
    """Have the dropout of a model on a CPU be drawn so; in compiled code torch's own is faster."""
    if config.device == "cpu" and config.compile == "off":
        for part in module.modules():
            if type(part) is nn.Dropout:
                part.__class__ = DrawnDropout
