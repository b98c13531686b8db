"""The order in which a rank runs the forward and backward passes of a step through its stages."""

from __future__ import annotations

from collections.abc import Iterator

Pass = tuple[str, int]
"""``forward`` or ``backward``, and the chunk: the number of the stage among the
stages of the rank.
"""


def pass_order(schedule: str, micros: int, rank: int, ranks: int, chunks: int) -> Iterator[Pass]:
    """Yield each chunk's passes, ``micros`` forward and as many backward. Each takes
    the chunk's next micro-batch.

    ``gpipe``: all forward passes, then all backward passes. ``1f1b``: a rank runs ahead of the next
    one by one micro-batch, then alternates one forward and one backward pass, so that it keeps the
    activations of at most ``ranks - rank`` micro-batches (PipeDream-Flush: Narayanan et al., 2021,
    arXiv:2006.09503). ``interleaved``: see ``_interleaved``. All ranks run forward passes in the
    same order, and so backward passes, so that messages arrive in the order in which they are
    expected.
    """
    if schedule == "interleaved":
        yield from _interleaved(micros, rank, ranks, chunks)
        return
    ahead = micros if schedule == "gpipe" else min(micros, ranks - rank)
    yield from [("forward", 0)] * ahead
    for _ in range(micros - ahead):
        yield "backward", 0
        yield "forward", 0
    yield from [("backward", 0)] * ahead


def _interleaved(micros: int, rank: int, ranks: int, chunks: int) -> Iterator[Pass]:
    """Yield the passes of interleaved 1F1B (Narayanan et al., 2021, arXiv:2104.04473).

    A group of micro-batches goes through all chunks before the next group starts. A group smaller
    than the number of ranks could deadlock ranks that alternate forward and backward passes. The
    rest of the division is therefore spread over the groups.
    """
    groups = max(1, micros // ranks)
    sizes = [micros // groups + (number < micros % groups) for number in range(groups)]
    forward = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    ahead = min(len(forward), 2 * (ranks - rank - 1) + (chunks - 1) * sizes[0])
    backward = iter([chunks - 1 - chunk for chunk in forward])
    yield from (("forward", chunk) for chunk in forward[:ahead])
    for chunk in forward[ahead:]:
        yield "forward", chunk
        yield "backward", next(backward)
    yield from (("backward", chunk) for chunk in backward)
