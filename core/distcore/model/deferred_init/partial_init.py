"""Draw a part of a random tensor: bit for bit the numbers of a whole draw, in less time and memory.

A tensor is drawn block by block. Wanted blocks are drawn in place. Other blocks are drawn into a
scratch block that stays in the processor's cache, or skipped by drawing as many raw numbers. A
trial run of each kind of draw compares the numbers, and the generator's state after them, with a
whole draw. If they differ, tensors are drawn whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from distcore.model.deferred_init.recording import Operation, View

BLOCK = 1 << 16
"""Elements per block: they fit a core's cache, and are a multiple of the 16 that torch draws.
"""
DRAWS = frozenset({"normal_", "uniform_"})
"""Operations that draw elements in order and are common in initialization."""

Fill = Callable[[Tensor], object]
"""Draws the values of a tensor, in place."""


def drawn_by(operation: Operation) -> View | None:
    """Return the tensor that an operation draws element by element; ``None`` for other operations.

    The tensor fills its storage. Call ``draw`` only for operations for which this returns a view.
    """
    if not operation.is_random or operation.reads:
        return None
    if operation.function.overloadpacket.__name__ not in DRAWS:
        return None
    view: View = operation.arguments[0]
    contiguous_stride = torch.empty(view.size, device="meta").stride()
    return view if view.stride == contiguous_stride else None


def draw(operation: Operation, start: int, count: int) -> Tensor:
    """Return ``count`` elements of an operation's draw, from ``start`` on; skip the others."""
    view: View = operation.arguments[0]
    size = torch.Size(view.size).numel()
    fill = partial(_fill, operation)
    is_whole_draw = partial(_is_the_same, operation.function, view.dtype)
    if size < 2 * BLOCK or not is_whole_draw(passes_over=False):
        whole = torch.empty(size, dtype=view.dtype)
        fill(whole)
        return whole[start : start + count]
    return _draw(fill, size, view.dtype, start, count, is_whole_draw(passes_over=True))


def _draw(
    fill: Fill, size: int, dtype: torch.dtype, start: int, count: int, passes_over: bool
) -> Tensor:
    """Return ``count`` elements of a draw of ``size`` elements, from ``start`` on.

    With ``passes_over`` blocks without a wanted element are skipped: as many raw numbers are drawn.
    """
    stop = start + count
    drawn = torch.empty(count, dtype=dtype)
    aside = torch.empty(2 * BLOCK, dtype=dtype)
    raw = torch.empty(4 * BLOCK, dtype=torch.uint8)
    skipped = 0
    for first, last in _blocks(size):
        begin, end = max(first, start), min(last, stop)
        # The last block is never skipped: torch draws extra numbers for a size that is no
        # multiple of 16.
        if passes_over and begin >= end and last < size:
            skipped += last - first
            if skipped == len(raw):
                raw.random_()
                skipped = 0
            continue
        # Advances the generator by one number per byte: torch's fastest draw.
        raw[:skipped].random_()
        skipped = 0
        if (begin, end) == (first, last):
            fill(drawn[first - start : last - start])
        else:
            block = aside[: last - first]
            fill(block)
            if begin < end:
                drawn[begin - start : end - start] = block[begin - first : end - first]
    return drawn


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield first and last of each block, the last exclusive; the last block has the rest, too."""
    count = size // BLOCK
    for number in range(count):
        is_last = number == count - 1
        yield number * BLOCK, size if is_last else (number + 1) * BLOCK


@cache
def _is_the_same(function: Fill, dtype: torch.dtype, passes_over: bool) -> bool:
    """Return True if a draw in parts gives the numbers of a whole draw: compare them once."""
    with torch.random.fork_rng(devices=[]):
        # torch draws more numbers if the size is no multiple of 16.
        for size in (4 * BLOCK, 4 * BLOCK + 7):
            torch.default_generator.manual_seed(size)
            whole = torch.empty(size, dtype=dtype)
            function(whole)
            state_after = torch.get_rng_state()
            inside = (BLOCK // 2, BLOCK)
            start_of_rest = 3 * BLOCK - 3
            rest = (start_of_rest, size - start_of_rest)
            nothing = (0, 0)
            for start, count in (inside, rest, nothing):
                torch.default_generator.manual_seed(size)
                part = _draw(function, size, dtype, start, count, passes_over)
                if not torch.equal(part, whole[start : start + count]):
                    return False
                if not torch.equal(torch.get_rng_state(), state_after):
                    return False
    return True


def _fill(operation: Operation, tensor: Tensor) -> None:
    operation.function(tensor, *operation.arguments[1:], **operation.named)
