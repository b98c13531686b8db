"""NF4: weights in 4 bits, as QLoRA defines them (arXiv:2305.14314).

Codes and scales are those of bitsandbytes on a CPU.

A block of 64 weights in a row becomes 36 bytes of that row: two codes a byte, the first in the high
half, then an fp32 scale, the largest magnitude. So any rows, and any blocks of them, are made from
the same weights of a file, and a strategy may split both. A byte has no arithmetic: no strategy
casts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Weights that share a scale."""
RECIPE = "NF4 in blocks of 64"
"""Names the format in the digest of a base, so that no checkpoint is read with another one."""
CODES = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
"""Values of the codes: quantiles of a normal distribution, from appendix E of the paper."""
MIDPOINTS = (CODES[1:] + CODES[:-1]) / 2
_VALUES_OF_BYTES = torch.stack((CODES.repeat_interleave(16), CODES.repeat(16)), 1)
PAIRS = _VALUES_OF_BYTES.view(torch.int64).flatten()
"""Both values of a byte, as one number of 8 bytes: one look-up for two weights."""
BLOCK_BYTES = BLOCK // 2 + 4
"""Bytes of a block."""


def bytes_of_row(columns: int) -> int:
    """Return the number of bytes of a row of ``columns`` weights, a multiple of BLOCK."""
    return columns // BLOCK * BLOCK_BYTES


AT_ONCE = 2**20
"""Weights that are quantized at once, so that temporary tensors are small."""


def quantize(rows: Tensor) -> Tensor:
    """Return rows of floats, ``(rows, columns)``, as bytes, ``(rows, bytes_of_row(columns))``."""
    rows_at_once = max(1, AT_ONCE // rows.shape[1])
    parts = rows.split(rows_at_once)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return torch.cat([_quantize(part) for part in parts])


def _quantize(rows: Tensor) -> Tensor:
    """Return the bytes of rows that are quantized at once."""
    blocks_of_row = rows.shape[1] // BLOCK
    blocks = rows.float().view(len(rows), blocks_of_row, BLOCK)
    scales = blocks.abs().amax(2)
    # Division, not a product with 1 / scale: the same codes on every device.
    divisors = torch.where(scales == 0, 1, scales).unsqueeze(2)
    midpoints = MIDPOINTS.to(rows.device)
    codes = torch.bucketize(blocks / divisors, midpoints, out_int32=True).to(torch.uint8)
    pairs = codes[..., 0::2] << 4 | codes[..., 1::2]
    bytes_of_scales = scales.unsqueeze(2).view(torch.uint8)
    return torch.cat((pairs, bytes_of_scales), 2).flatten(1)


def dequantize(packed: Tensor) -> Tensor:
    """Return the rows in fp32, ``(rows, columns)``, for rows of bytes."""
    blocks = packed.view(len(packed), packed.shape[1] // BLOCK_BYTES, BLOCK_BYTES)
    codes = blocks[..., : BLOCK // 2].int().flatten()
    scales = blocks[..., BLOCK // 2 :].contiguous().view(torch.float32)
    pairs = PAIRS.to(packed.device)
    weights = pairs.index_select(0, codes).view(torch.float32)
    rows, blocks_of_row, _ = blocks.shape
    return weights.view(rows, blocks_of_row, BLOCK).mul_(scales).flatten(1)
