"""Convolutions over images that are smaller than their window, for training in 16 bits on a CPU.

Where a stride is 2 or more, oneDNN (3.12, in torch 2.13) leaves the gradient of weights that meet
nothing but padding as the memory was: noise or NaN, which an optimizer adds to the model.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional


class Conv2d(nn.Conv2d):
    """A convolution without the weights that meet nothing but padding; they get a gradient of 0."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Crop the weight, and pad by hand as far as the rest of it reaches."""
        if self.training and input.device.type == "cpu":
            rows = self._reach(input, 0)
            columns = self._reach(input, 1)
            weights_of_rows = weight[:, :, rows.first : rows.last + 1]
            kernel = weights_of_rows[..., columns.first : columns.last + 1]
            if kernel.shape != weight.shape:
                padded = functional.pad(input, (*columns.padding, *rows.padding))
                return functional.conv2d(
                    padded, kernel, bias, self.stride, 0, self.dilation, groups=self.groups
                )
        whole: Tensor = super()._conv_forward(input, weight, bias)
        return whole

    def _reach(self, input: Tensor, axis: int) -> Reach:
        """Return which weights meet pixels along the height, 0, or the width, 1."""
        # As torch has it: the last dimension first, two numbers for each.
        before, after = self._reversed_padding_repeated_twice[2 - 2 * axis : 4 - 2 * axis]
        return reach_of(
            input.shape[axis - 2],
            self.kernel_size[axis],
            self.stride[axis],
            self.dilation[axis],
            (before, after),
        )


def leave_out_weights_of_padding(model: nn.Module) -> None:
    """Change the class of each convolution that could have such weights, in place."""
    for layer in model.modules():
        # One of a class of its own may compute in another way.
        if not isinstance(layer, nn.Conv2d) or type(layer) is not nn.Conv2d:
            continue
        is_strided = max(layer.stride) > 1 and max(layer.kernel_size) > 1
        if is_strided and layer.padding_mode == "zeros":
            layer.__class__ = Conv2d


class Reach(NamedTuple):
    """The weights, along one side of an image, that meet some of its pixels."""

    first: int
    """The first of them."""
    last: int
    """The last of them."""
    padding: tuple[int, int]
    """Before and after the image, as the weights between them need; some pixels are left out where
    it is negative."""


def reach_of(
    size: int,
    kernel: int,
    stride: int,
    dilation: int,
    padding: tuple[int, int],
) -> Reach:
    """Return the reach along a side of ``size`` pixels; all weights if none meets a pixel."""
    before, after = padding
    outputs = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
    starts = range(-before, outputs * stride - before, stride)
    meeting = [
        number
        for number in range(kernel)
        if any(0 <= start + number * dilation < size for start in starts)
    ]
    if not meeting:
        return Reach(0, kernel - 1, padding)
    first, last = meeting[0], meeting[-1]
    left = before - first * dilation
    right = starts[-1] + last * dilation + 1 - size
    return Reach(first, last, (left, right))
