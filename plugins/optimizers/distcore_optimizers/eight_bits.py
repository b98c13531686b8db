"""Tensors with 8 bits per element: each block of a row has a scale, and levels lie
closer together near zero.

The levels are those of Dettmers et al., 2021 (https://arxiv.org/abs/2110.02861), made symmetric: 1
and -1 are levels, so a decoded tensor encodes to the same scales and codes again. A block never
crosses a row, so a shard of whole rows is encoded like the same rows of the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Least number of elements that share a scale, except in a shorter row."""
SHORTEST = 80
"""Shortest row that is encoded: in a shorter one, scales of two moments take more than
0.1 bytes per element.
"""
LEAST_SCALE = 2.0**-40
"""A block whose largest element is smaller becomes zero: the square of its smallest level
would round in fp32.
"""
_BUCKETS = 0x3F80 + 1
"""Values of the upper 16 bits of the fp32 numbers from 0 to 1."""


class Encoded(NamedTuple):
    """An encoded tensor."""

    codes: Tensor
    """The number of each element's level, uint8, of the tensor's shape."""
    scales: Tensor
    """The largest magnitude of each block, fp32, shape ``(rows, blocks of a row)``."""


@dataclass(frozen=True)
class Levels:
    """The values that elements of a block can have, relative to its largest magnitude."""

    values: Tensor
    """By code, fp32, shape ``(256,)``."""
    middles: Tensor
    """Midpoints of the magnitudes of neighboring codes, fp32; the last is infinite."""
    buckets: Tensor
    """The code of the smallest magnitude with the same upper 16 bits, uint8. A bucket has
    at most one midpoint.
    """
    signed: bool
    """True if the second half of the codes are the negative values of the first; False if
    no element is negative.
    """

    def encode(self, values: Tensor) -> Encoded:
        """Return the nearest level of each element, and the scale of each block.

        ``values`` are fp32 and have at least two dimensions.
        An unsigned element above zero is never rounded to zero.
        """
        blocks = in_blocks(values)
        scales = blocks.abs().amax(-1)
        scales = torch.where(scales < LEAST_SCALE, 0.0, scales)
        parts = blocks / torch.where(scales > 0, scales, torch.inf).unsqueeze(-1)
        parts = parts.view(len(values), -1)[:, : values[0].numel()].reshape(values.shape)
        sizes = parts.abs()
        below = self.buckets[sizes.view(torch.int32) >> 16]
        codes = below + (sizes > self.middles[below.int()])
        return Encoded(codes + torch.signbit(parts) * 128 if self.signed else codes, scales)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the tensor, fp32."""
        values = self.values[encoded.codes.int()]
        blocks = in_blocks(values) * encoded.scales.unsqueeze(-1)
        return blocks.view(len(values), -1)[:, : values[0].numel()].reshape(values.shape)


def signed_levels(device: torch.device) -> Levels:
    """Return the levels of first moments."""
    magnitudes = _magnitudes(6, device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    return Levels(torch.cat([magnitudes, -magnitudes]), *_search_table(middles), signed=True)


def root_levels(device: torch.device) -> Levels:
    """Return the levels of roots of second moments. None above 0 becomes 0, which would
    make a small step large.
    """
    values = _magnitudes(7, device)
    middles = (values[1:] + values[:-1]) / 2
    middles[0] = 0.0
    return Levels(values, *_search_table(middles), signed=False)


def zeros(shape: torch.Size, device: torch.device) -> Encoded:
    """Return a tensor of zeros."""
    blocks = max(1, shape[1:].numel() // BLOCK)
    return Encoded(
        torch.zeros(shape, dtype=torch.uint8, device=device),
        torch.zeros(shape[0], blocks, device=device),
    )


def in_blocks(values: Tensor) -> Tensor:
    """Return the elements as ``(rows, blocks, elements of a block)``; zeros fill the last
    block of a row.
    """
    rows = values.reshape(len(values), -1)
    count = max(1, rows.shape[1] // BLOCK)
    size = -(-rows.shape[1] // count)
    return F.pad(rows, (0, count * size - rows.shape[1])).view(len(rows), count, size)


def is_encoded(shape: torch.Size) -> bool:
    """Return True if a tensor has rows that are long enough."""
    return len(shape) > 1 and shape[1:].numel() >= SHORTEST


def _magnitudes(decades: int, device: torch.device) -> Tensor:
    """Return 0, the midpoints of 2, 4, 8… equal parts of the decades up to 1, and 1:
    ``2**(decades + 1)`` values.
    """
    values = [0.0]
    for decade in range(1, decades + 1):
        edges = [1 + 9 * part / 2**decade for part in range(2**decade + 1)]
        values += [
            10.0 ** (decade - decades - 1) * (low + high) / 2 for low, high in pairwise(edges)
        ]
    return torch.tensor([*values, 1.0], device=device)


def _search_table(middles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ``middles`` and ``buckets`` of ``Levels``."""
    least = (torch.arange(_BUCKETS, dtype=torch.int32, device=middles.device) << 16).view(
        torch.float32
    )
    buckets = torch.bucketize(least, middles).to(torch.uint8)
    return F.pad(middles, (0, 1), value=torch.inf), buckets
