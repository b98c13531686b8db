"""Tensors with 8 bits per element: blocks have a scale, and levels lie closer near zero.

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
        largest = blocks.abs().amax(-1)
        scales = torch.where(largest < LEAST_SCALE, 0.0, largest)

        # A block without a scale is divided by infinity: by zero, its zeros would become NaN.
        divisors = torch.where(scales > 0, scales, torch.inf).unsqueeze(-1)
        relative = _without_padding(blocks / divisors, values.shape)
        magnitudes = relative.abs()

        # A bucket has at most one midpoint, so the code is that of the bucket or the next one.
        codes_of_buckets = self.buckets[magnitudes.view(torch.int32) >> 16]
        codes = codes_of_buckets + (magnitudes > self.middles[codes_of_buckets.int()])
        if self.signed:
            codes = codes + torch.signbit(relative) * 128
        return Encoded(codes, scales)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the tensor, fp32."""
        values = self.values[encoded.codes.int()]
        blocks = in_blocks(values) * encoded.scales.unsqueeze(-1)
        return _without_padding(blocks, values.shape)


def signed_levels(device: torch.device) -> Levels:
    """Return the levels of first moments."""
    magnitudes = _magnitudes(6, device)
    middles, buckets = _search_table((magnitudes[1:] + magnitudes[:-1]) / 2)
    values = torch.cat([magnitudes, -magnitudes])
    return Levels(values, middles, buckets, signed=True)


def root_levels(device: torch.device) -> Levels:
    """Return the levels of roots of second moments."""
    values = _magnitudes(7, device)
    midpoints = (values[1:] + values[:-1]) / 2
    # No root above 0 is rounded to 0: a step is divided by it, so a small step would be large.
    midpoints[0] = 0.0
    middles, buckets = _search_table(midpoints)
    return Levels(values, middles, buckets, signed=False)


def zeros(shape: torch.Size, device: torch.device) -> Encoded:
    """Return a tensor of zeros."""
    blocks = _blocks_per_row(shape[1:].numel())
    codes = torch.zeros(shape, dtype=torch.uint8, device=device)
    scales = torch.zeros(shape[0], blocks, device=device)
    return Encoded(codes, scales)


def in_blocks(values: Tensor) -> Tensor:
    """Return the elements as ``(rows, blocks of a row, elements of a block)``.

    Zeros fill the last block of a row.
    """
    rows = values.reshape(len(values), -1)
    length = rows.shape[1]
    blocks = _blocks_per_row(length)
    block_size = -(-length // blocks)  # rounded up
    padding = blocks * block_size - length
    return F.pad(rows, (0, padding)).view(len(rows), blocks, block_size)


def is_encoded(shape: torch.Size) -> bool:
    """Return True if a tensor has rows that are long enough."""
    return len(shape) > 1 and shape[1:].numel() >= SHORTEST


def _blocks_per_row(length: int) -> int:
    """Return the number of blocks of a row: one of a row that is shorter than ``BLOCK``."""
    return max(1, length // BLOCK)


def _without_padding(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo ``in_blocks``: return the elements in their ``shape``, without the zeros at the end."""
    rows = blocks.view(shape[0], -1)
    return rows[:, : shape[1:].numel()].reshape(shape)


def _magnitudes(decades: int, device: torch.device) -> Tensor:
    """Return the magnitudes of levels, ascending, fp32, shape ``(2**(decades + 1),)``.

    They are 0, the midpoints of 2, 4, 8… equal parts of the decades up to 1, and 1.
    """
    values = [0.0]
    for decade in range(1, decades + 1):
        parts = 2**decade
        unit = 10.0 ** (decade - decades - 1)
        edges = [1 + 9 * part / parts for part in range(parts + 1)]
        values += [unit * (low + high) / 2 for low, high in pairwise(edges)]
    return torch.tensor([*values, 1.0], device=device)


def _search_table(middles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ``middles`` and ``buckets`` of ``Levels``.

    A code is found by its bucket: to search the midpoints for each element takes longer.
    """
    upper_bits = torch.arange(_BUCKETS, dtype=torch.int32, device=middles.device)
    least_of_buckets = (upper_bits << 16).view(torch.float32)
    buckets = torch.bucketize(least_of_buckets, middles).to(torch.uint8)
    return F.pad(middles, (0, 1), value=torch.inf), buckets
