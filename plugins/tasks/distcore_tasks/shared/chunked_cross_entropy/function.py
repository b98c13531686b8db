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
"""Most chunks of a micro-batch: more rows make larger chunks. An accelerator is
faster with fewer (docs/devices.md).
"""


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    ignored: int,
) -> Tensor:
    """Return the sum of the losses, fp32 without dimensions, as ``cross_entropy`` of torch does
    for the whole logits.

    ``hidden`` is ``(rows, size)``, ``weight`` ``(vocabulary, size)``; ``labels``, int64
    ``(rows,)``, are classes, or ``ignored``. The logits have the dtype of autocast, else that of
    ``hidden``; all else is computed in fp32. Backward works once.
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
    """Return for each row its loss, its loss without smoothing, and 1 if its label has the
    largest logit, else 0.

    fp32 ``(rows, 3)``, without gradient; 0 for ``ignored`` rows. Arguments
    are those of ``summed_cross_entropy``.
    """
    result = torch.zeros(len(hidden), 3, dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows, logits in _chunks(hidden.to(_dtype_of(hidden)), weight, bias):
            kept, target = labels[rows] != ignored, labels[rows].clamp(min=0)
            right = logits.argmax(1) == target
            loss, plain = _losses(logits, target[:, None], smoothing)[:2]
            result[rows] = torch.stack((loss, plain, right.float()), 1) * kept[:, None]
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
        inputs = hidden.to(_dtype_of(hidden))
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Sums over chunks are in fp32, whatever the dtype of the products.
        of_hidden = torch.empty_like(inputs) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = (
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        )
        losses = torch.empty(len(inputs), dtype=torch.float32, device=inputs.device)
        with torch.autocast(inputs.device.type, enabled=False):
            own = weight.to(inputs.dtype)
            for rows, logits in _chunks(inputs, own, bias):
                kept, target = labels[rows] != ignored, labels[rows].clamp(min=0)[:, None]
                loss, _, powers, totals = _losses(logits, target, smoothing)
                losses[rows] = loss * kept
                gradient = _gradient_of_logits(powers, totals, target, smoothing).mul_(
                    kept[:, None]
                )
                if of_bias is not None:
                    of_bias += gradient.sum(0)
                gradient = gradient.to(inputs.dtype)
                if of_hidden is not None:
                    torch.mm(gradient, own, out=of_hidden[rows])
                if of_weight is not None:
                    _add_product(of_weight, gradient.t(), inputs[rows])
        ctx.gradients = of_hidden, of_weight, of_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward through a chunked cross entropy works once")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (
            _scaled(made, scale, dtype) for made, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the gradient times ``scale``, which is never rounded to half precision."""
    if gradient is None:
        return None
    if gradient.dtype == scale.dtype:
        # in place: of the weight, a copy would be the step's largest tensor
        return gradient.mul_(scale).to(dtype)
    return (gradient.to(scale.dtype) * scale).to(dtype)


def _dtype_of(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _chunks(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their logits, fp32 ``(rows, vocabulary)``: one buffer, which
    the caller may change.
    """
    weight = weight.to(inputs.dtype).t()
    bias = None if bias is None else bias.to(inputs.dtype)
    size = max(
        ROWS, -(-len(inputs) // (CHUNKS if inputs.device.type == "cpu" else CHUNKS_ON_ACCELERATOR))
    )
    shape = min(size, len(inputs)), weight.shape[1]
    product = torch.empty(shape, dtype=inputs.dtype, device=inputs.device)
    logits = (
        product if inputs.dtype == torch.float32 else torch.empty_like(product, dtype=torch.float32)
    )
    for start in range(0, len(inputs), size):
        rows = slice(start, min(start + size, len(inputs)))
        made = product[: rows.stop - start]
        if bias is None:
            torch.mm(inputs[rows], weight, out=made)
        else:
            torch.addmm(bias, inputs[rows], weight, out=made)
        yield rows, made if logits is product else logits[: len(made)].copy_(made)


def _losses(
    logits: Tensor, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of each row, that without smoothing, and powers and
    their sums; overwrites ``logits``.
    """
    hit = logits.gather(1, target)
    mean = logits.mean(1, keepdim=True) if smoothing else hit
    largest = logits.amax(1, keepdim=True)
    powers = logits.sub_(largest).exp_()
    totals = powers.sum(1, keepdim=True)
    plain = (totals.log() + largest - hit)[:, 0]
    return plain + smoothing * (hit - mean)[:, 0] if smoothing else plain, plain, powers, totals


def _gradient_of_logits(powers: Tensor, totals: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return the gradient of each row's loss, in place of ``powers``."""
    gradient = powers.div_(totals)
    if smoothing:
        gradient.sub_(smoothing / powers.shape[1])
    return gradient.scatter_add_(1, target, torch.full_like(totals, smoothing - 1))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
