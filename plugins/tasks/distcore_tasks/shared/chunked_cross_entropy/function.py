"""The cross entropy of a linear head, from hidden states, in chunks of rows.

Gradients are computed with the loss, chunk by chunk, because the loss of a task is a plain sum: in
backward they are only scaled. torch's ``linear_cross_entropy`` adds losses up in the dtype of its
input, which is wrong by percents in bf16, and computes all logits with label smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ROWS = 64
"""Fewest rows of a chunk: with less, a matrix product is slower."""
CHUNKS, CHUNKS_ON_ACCELERATOR = 32, 8
"""Most chunks of a micro-batch: more rows make larger chunks.

An accelerator is faster with fewer (docs/devices.md).
"""


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    ignored: int,
) -> Tensor:
    """Return the sum of the losses, fp32 without dimensions.

    It is that of torch's ``cross_entropy`` for the whole logits. ``hidden`` is ``(rows, size)``,
    ``weight`` ``(vocabulary, size)``; ``labels``, int64 ``(rows,)``, are classes, or ``ignored``.
    The logits have the dtype of autocast, else that of ``hidden``; all else is computed in fp32.
    Backward works once.
    """
    total: Tensor = _Summed.apply(hidden, weight, bias, labels, smoothing, ignored)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def scored(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    ignored: int,
) -> Tensor:
    """Return three numbers for each row, fp32 ``(rows, 3)``, without gradient.

    These are its loss, its loss without smoothing, and 1 if its label has the largest logit, else
    0. All are 0 for ``ignored`` rows. Arguments are those of ``summed_cross_entropy``.
    """
    result = torch.zeros(len(hidden), 3, dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows, logits in _chunks(hidden.to(_dtype_of(hidden)), weight, bias):
            is_counted = labels[rows] != ignored
            target = labels[rows].clamp(min=0)
            # Before ``_losses``, which overwrites the logits.
            is_right = logits.argmax(1) == target
            loss, plain, _, _ = _losses(logits, target[:, None], smoothing)
            columns = torch.stack((loss, plain, is_right.float()), 1)
            result[rows] = columns * is_counted[:, None]
    return result


class _Summed(torch.autograd.Function):
    """The sum of the losses. Its gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        ignored: int,
    ) -> Tensor:
        """Return the sum of the losses, and keep the gradients that ``backward`` scales."""
        inputs = hidden.to(_dtype_of(hidden))
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Sums over chunks are in fp32, whatever the dtype of the products.
        grad_hidden = torch.empty_like(inputs) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias: Tensor | None = None
        if bias is not None and wants_bias:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        losses = torch.empty(len(inputs), dtype=torch.float32, device=inputs.device)
        with torch.autocast(inputs.device.type, enabled=False):
            cast_weight = weight.to(inputs.dtype)
            for rows, logits in _chunks(inputs, cast_weight, bias):
                is_counted = labels[rows] != ignored
                target = labels[rows].clamp(min=0)[:, None]
                loss, _, powers, totals = _losses(logits, target, smoothing)
                losses[rows] = loss * is_counted
                gradient = _gradient_of_logits(powers, totals, target, smoothing)
                gradient.mul_(is_counted[:, None])
                if grad_bias is not None:
                    grad_bias += gradient.sum(0)
                gradient = gradient.to(inputs.dtype)
                if grad_hidden is not None:
                    torch.mm(gradient, cast_weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    _add_product(grad_weight, gradient.t(), inputs[rows])
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return the kept gradients times ``scale``; none for labels, smoothing and ignored."""
        if ctx.gradients is None:
            raise RuntimeError("backward through a chunked cross entropy works once")
        # Dropped here, because they are scaled in place.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = []
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            scaled.append(_scaled(gradient, scale, dtype))
        return *scaled, None, None, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the gradient times ``scale``, which is never rounded to half precision."""
    if gradient is None:
        return None
    if gradient.dtype == scale.dtype:
        # In place: a copy of the weight's gradient would be the step's largest tensor.
        return gradient.mul_(scale).to(dtype)
    return (gradient.to(scale.dtype) * scale).to(dtype)


def _dtype_of(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the logits: that of autocast, else that of ``hidden``."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


def _chunks(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their logits, fp32 ``(rows, vocabulary)``.

    All logits are in one buffer, which the caller may change.
    """
    weight = weight.to(inputs.dtype).t()
    bias = None if bias is None else bias.to(inputs.dtype)
    most_chunks = CHUNKS if inputs.device.type == "cpu" else CHUNKS_ON_ACCELERATOR
    size = max(ROWS, -(-len(inputs) // most_chunks))  # ceiling division
    shape = min(size, len(inputs)), weight.shape[1]
    product_buffer = torch.empty(shape, dtype=inputs.dtype, device=inputs.device)
    logits_buffer = product_buffer
    if inputs.dtype != torch.float32:
        logits_buffer = torch.empty_like(product_buffer, dtype=torch.float32)
    for start in range(0, len(inputs), size):
        rows = slice(start, min(start + size, len(inputs)))
        logits = product = product_buffer[: rows.stop - start]
        if bias is None:
            torch.mm(inputs[rows], weight, out=product)
        else:
            torch.addmm(bias, inputs[rows], weight, out=product)
        if logits_buffer is not product_buffer:
            logits = logits_buffer[: len(product)].copy_(product)
        yield rows, logits


def _losses(
    logits: Tensor, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's loss, ``(rows,)``, and its loss without smoothing; overwrites ``logits``.

    With them come the exponentials of the logits, relative to the largest one, ``(rows,
    vocabulary)``, and their sums, ``(rows, 1)``, from which the gradient follows.
    """
    target_logit = logits.gather(1, target)
    mean = logits.mean(1, keepdim=True) if smoothing else target_logit
    largest = logits.amax(1, keepdim=True)
    powers = logits.sub_(largest).exp_()
    totals = powers.sum(1, keepdim=True)
    plain = (totals.log() + largest - target_logit)[:, 0]
    loss = plain
    if smoothing:
        loss = plain + smoothing * (target_logit - mean)[:, 0]
    return loss, plain, powers, totals


def _gradient_of_logits(powers: Tensor, totals: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return the gradient of each row's loss, in place of ``powers``."""
    gradient = powers.div_(totals)
    if smoothing:
        gradient.sub_(smoothing / powers.shape[1])
    return gradient.scatter_add_(1, target, torch.full_like(totals, smoothing - 1))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, in the dtype of ``total``."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
