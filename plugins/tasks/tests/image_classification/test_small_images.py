"""Strided convolutions over images smaller than their window: no gradient is noise."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distcore.config import RunConfig
from distcore_tasks.image_classification.prepare import empty_datasets
from distcore_tasks.image_classification.preprocessing import Preprocessing
from distcore_tasks.image_classification.small_images import leave_out_weights_of_padding
from distcore_tasks.image_classification.task import ImageClassification

SIZES = ((1, 1), (2, 2), (1, 4), (3, 2), (5, 5))
CASES = [
    (kernel, stride, padding, dilation, size)
    for kernel, stride, padding, dilation, size in product(
        (1, 3, 5, 7), (2, 3), (0, 1, 3), (1, 2), SIZES
    )
    if all(side + 2 * padding > dilation * (kernel - 1) for side in size)
]
"""Kernel, stride, padding, dilation and image, where the padded image is as large as the window."""


def computed(net: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the images and of all weights."""
    images = images.clone().requires_grad_()
    output = net(images)
    return [output, *torch.autograd.grad(output.sin().sum(), [images, *net.parameters()])]


def test_a_convolution_without_the_weights_that_meet_padding_alone_is_the_same() -> None:
    torch.manual_seed(0)
    assert len(CASES) > 100
    for kernel, stride, padding, dilation, size in CASES:
        net = nn.Sequential(nn.Conv2d(4, 6, kernel, stride, padding, dilation, groups=2)).double()
        images = torch.randn(2, 4, *size, dtype=torch.double)
        expected = computed(net, images)
        leave_out_weights_of_padding(net)
        for got, right in zip(computed(net, images), expected, strict=True):
            torch.testing.assert_close(got, right, atol=1e-12, rtol=1e-12)


def fill_free_memory_with_nan() -> None:
    """Leave NaN where the next tensors of such sizes may lie."""
    for count in (18_432, 73_728, 147_456):
        for dtype in (torch.float32, torch.bfloat16):
            torch.full((count,), float("nan"), dtype=dtype)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_network_has_the_same_gradients_each_time_on_a_cpu(precision: str) -> None:
    """Its last blocks see a single pixel of an image of 8 x 8."""
    config = RunConfig(device="cpu", precision=precision)
    data = empty_datasets(tuple(range(10)), Preprocessing(8))
    torch.manual_seed(0)
    model: Any = ImageClassification(model="resnet-tiny").build_model(config, data).train()
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8)
    gradients: list[list[Tensor]] = []
    for _ in range(6):
        fill_free_memory_with_nan()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(pixel_values=images).logits
        loss = nn.functional.cross_entropy(logits.float(), labels)
        gradients.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    assert all(gradient.isfinite().all() for gradient in gradients[0])
    for again in gradients[1:]:
        assert all(map(torch.equal, again, gradients[0]))
