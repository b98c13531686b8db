"""Emulate what accelerator kernels save for backward: steps are traced on a CPU,
whose kernels save more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@contextmanager
def kernels_of(kind: str) -> Iterator[None]:
    """Have dropout and attention keep what they keep on a ``kind`` of device.

    Dropout keeps which values it took, a byte for each; on a CPU the factors, as wide as the
    values. Flash and memory-efficient attention keep one number for each row of scores; a CPU has
    no such kernel with dropout, and keeps the scores.
    """
    if kind == "cpu":
        yield
        return
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout

    def without_scores(*arguments: Any, **options: Any) -> Any:
        options |= dict(
            zip(
                ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
                arguments,
                strict=False,
            )
        )
        return attention(**options | {"dropout_p": 0.0})

    def with_mask(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or inplace or not 0 < p < 1:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    functional.scaled_dot_product_attention = without_scores
    functional.dropout = with_mask
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention
        functional.dropout = dropout
