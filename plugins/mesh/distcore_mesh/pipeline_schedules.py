"""The order in which a rank runs the forward and backward passes of a step through its stages."""

from __future__ import annotations

from collections.abc import Iterator

Pass = tuple[str, int]
"""``forward`` or ``backward``, and the chunk: a stage's number among the stages of its rank."""


def pass_order(
    schedule: str,
    micros: int,
    rank: int,
    ranks: int,
    chunks: int,
) -> Iterator[Pass]:
    """Yield each chunk's passes, ``micros`` forward and as many backward.

    Each pass takes the chunk's next micro-batch.

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
    group_size, rest = divmod(micros, groups)
    group_sizes = [group_size + 1] * rest + [group_size] * (groups - rest)
    forward_chunks: list[int] = []
    for size in group_sizes:
        for chunk in range(chunks):
            forward_chunks += [chunk] * size
    # Backward passes have the order of forward passes, through the chunks from the last one on.
    backward_chunks = iter([chunks - 1 - chunk for chunk in forward_chunks])

    ahead = 2 * (ranks - rank - 1) + (chunks - 1) * group_sizes[0]
    for chunk in forward_chunks[:ahead]:
        yield "forward", chunk
    for chunk in forward_chunks[ahead:]:
        yield "forward", chunk
        yield "backward", next(backward_chunks)
    for chunk in backward_chunks:
        yield "backward", chunk
