"""A small convolutional network. Its prediction for an image is independent of the
rest of the batch.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

GROUPS = 8
"""Channel groups of group normalization. Batch normalization would mix the
images of a micro-batch.
"""


class ConvBlock(nn.Module):
    """A convolution, group normalization and a ReLU."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, width)

    def forward(self, values: Tensor) -> Tensor:
        """Map ``(n, before, h, w)`` to ``(n, width, h / stride, w / stride)``."""
        return nn.functional.relu(self.norm(self.conv(values)))


class ConvNet(nn.Module):
    """Convolution blocks, a mean over pixels, and a linear layer. All blocks but the first
    halve height and width.
    """

    def __init__(self, widths: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(3, widths[0], stride=1)])
        for inputs, outputs in pairwise(widths):
            self.blocks.append(ConvBlock(inputs, outputs, stride=2))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        """Return ``logits``, shape ``(n, classes)``, of images ``(n, 3, h, w)``."""
        values = pixel_values
        for block in self.blocks:
            values = block(values)
        means = values.mean((2, 3))
        logits = self.classifier(self.dropout(means))
        return ImageClassifierOutput(logits=logits)
