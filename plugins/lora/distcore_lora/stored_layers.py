"""Layers whose frozen weights are in 16 or 4 bits, and are widened inside each product alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distcore_lora import nf4


def widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stored ``weight`` in ``dtype``: one of bytes is NF4."""
    if weight.dtype == torch.uint8:
        weight = nf4.dequantize(weight)
    return weight.to(dtype)


class _Product(torch.autograd.Function):
    """The product with a frozen weight; backward widens it again, so that no wide copy is kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(inputs, widened(weight, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        gradient_of_inputs = gradient @ widened(weight, gradient.dtype)
        gradient_of_bias = None
        if ctx.needs_input_grad[2]:
            gradient_of_bias = gradient.flatten(0, -2).sum(0)
        return gradient_of_inputs, None, gradient_of_bias


class StoredLinear(nn.Linear):
    """A linear layer with a frozen 16-bit weight, which each product widens."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer with its weight in fp32."""
        return self.product(input, self.bias)

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output with ``bias`` instead of the layer's own.

        A strategy that sums parts of the output over ranks adds the bias once, after the sum.
        """
        # Autocast casts the weight, whatever its dtype.
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight, bias)
        product: Tensor = _Product.apply(input, self.weight, bias)  # type: ignore[no-untyped-call]
        return product


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in NF4, which each product widens.

    The weight is of bytes, uint8, as ``nf4.quantize`` returns it.
    """

    columns_together = nf4.BLOCK_BYTES
    """Columns of the weight that a strategy that splits them must leave together."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer with its weight dequantized."""
        return self.product(input, self.bias)

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output with ``bias`` instead of the layer's own, as ``StoredLinear`` does."""
        device = input.device.type
        # Otherwise the weight would be widened to fp32, and then cast.
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        product: Tensor = _Product.apply(input, self.weight, bias)  # type: ignore[no-untyped-call]
        return product


class StoredEmbedding(nn.Embedding):
    """An embedding with 16-bit weights; looked-up rows get the dtype of another parameter."""

    beside: tuple[nn.Module, str]
    """Module and name of that parameter.

    It is fp32, unless a strategy casts the whole model or gathers it in another dtype.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer with its weight in fp32."""
        module, name = self.beside
        return super().forward(input).to(getattr(module, name).dtype)
