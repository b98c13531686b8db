"""Causal attention of packed rows, document by document, on one rank or around a ring of ranks.

A packed row is documents, one after another. A token sees the earlier tokens of its document, or of
a window of it. So attention is a list of blocks, each a slice of queries and one of keys: causal
where both are the same tokens, full where the keys are earlier. No mask of tokens times tokens is
made. The results of a query's blocks are joined by their logarithms of sums of exponentials, in
fp32, and the backward pass takes the joined ones, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distcore_mesh.parallel_group import ParallelGroup

QUERIES_OF_A_WINDOW = 512
"""Queries of a block under a window. Its mask has as many rows, and the window's columns more."""


class Block(NamedTuple):
    """Queries of a row, and keys that all or some of them see."""

    row: int
    """The row of the batch."""
    queries: slice
    """The queries, counted from the first of their range."""
    keys: slice
    """The keys, counted from the first of their range."""
    seen: Tensor | None
    """The keys that each query sees, ``(queries, keys)``; ``None``: all, or the earlier ones."""
    is_causal: bool
    """True if queries and keys are the same tokens, of which each sees the earlier ones."""


@dataclass(frozen=True)
class PackedRows:
    """The documents of the rows of a batch."""

    starts: list[list[int]]
    """Of each row, the first token of each document."""
    window: int | None = None
    """Number of tokens that a token sees, itself one of them; ``None``: all of its document."""

    @classmethod
    def of_positions(cls, positions: Tensor, window: int | None = None) -> PackedRows:
        """Return it for ``positions``, ``(n, length)``, which begin at 0 with each document."""
        starts = []
        for row in positions:
            zeros = (row == 0).nonzero()[:, 0].tolist()
            starts.append([0, *(token for token in zeros if token)])
        return cls(starts, window)

    def blocks(self, queries: range, keys: range) -> Iterator[Block]:
        """Yield the blocks of some tokens of the rows with some others.

        The ranges are the same, or have no token in common.
        """
        if keys.start >= queries.stop:
            return  # later tokens, which no query sees
        for row, starts in enumerate(self.starts):
            for start, stop in pairwise([*starts, queries.stop]):
                own_queries = range(max(start, queries.start), min(stop, queries.stop))
                own_keys = range(max(start, keys.start), min(stop, keys.stop))
                if not own_queries or not own_keys:
                    continue
                if self.window is not None:
                    yield from self._blocks_of_a_window(row, own_queries, own_keys, queries, keys)
                    continue
                yield Block(
                    row,
                    _from(own_queries, queries),
                    _from(own_keys, keys),
                    seen=None,
                    is_causal=queries == keys,
                )

    def _blocks_of_a_window(
        self, row: int, own_queries: range, own_keys: range, queries: range, keys: range
    ) -> Iterator[Block]:
        """Yield the blocks of a document's queries with the keys in their windows."""
        assert self.window is not None
        for first in own_queries[::QUERIES_OF_A_WINDOW]:
            low = max(own_keys.start, first - self.window + 1)
            last = min(first + QUERIES_OF_A_WINDOW, own_queries.stop)
            high = min(own_keys.stop, last)
            # A query without a key would have an undefined result: the last ones see none.
            last = min(last, high + self.window - 1)
            if low >= high or first >= last:
                continue
            distances = torch.arange(first, last)[:, None] - torch.arange(low, high)
            seen = (distances >= 0) & (distances < self.window)
            yield Block(
                row,
                _from(range(first, last), queries),
                _from(range(low, high), keys),
                seen=None if seen.all() else seen,
                is_causal=False,
            )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    scale: float,
    group: ParallelGroup | None = None,
) -> Tensor:
    """Return attention for queries ``(n, heads, tokens, size)``, in their shape and dtype.

    Keys and values may have fewer heads, which the queries share. With ``group`` each rank has
    consecutive tokens of the rows, equally many, and keys and values go around its ranks.
    """
    output: Tensor = _Attention.apply(query, key, value, rows, scale, group)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    """Attention of a rank's tokens to those of the ranks before it, and to its own.

    In the backward pass the gradients of keys and values go around with them, and end where they
    belong.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: PackedRows,
        scale: float,
        group: ParallelGroup | None,
    ) -> Tensor:
        output = torch.zeros(query.shape, dtype=torch.float32)
        log_sums = torch.full(query.shape[:3], -torch.inf)
        own = _tokens_of(_rank(group), query.shape[2])
        for owner, (keys, values) in _passed_on(torch.stack((key, value)), group):
            blocks = rows.blocks(own, _tokens_of(owner, query.shape[2]))
            _add_blocks(query, keys, values, scale, blocks, output, log_sums)
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sums)
        ctx.settings = rows, scale, group
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        rows, scale, group = ctx.settings
        own = _tokens_of(_rank(group), query.shape[2])
        of_query = torch.zeros(query.shape, dtype=torch.float32)
        of_pair = torch.zeros((2, *key.shape), dtype=torch.float32)
        for owner, (keys, values) in _passed_on(torch.stack((key, value)), group):
            backward = _Backward(gradient, query, keys, values, output, log_sums, scale)
            for block in rows.blocks(own, _tokens_of(owner, query.shape[2])):
                backward.add(block, of_query, of_pair[0], of_pair[1])
            # After the last owner's turn they are at home.
            of_pair = _to_next(of_pair, group)()
        of_key, of_value = of_pair
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), *[None] * 3


def _add_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    blocks: Iterator[Block],
    output: Tensor,
    log_sums: Tensor,
) -> None:
    """Add the results of blocks to ``output`` and ``log_sums``, in place."""
    sharing = query.shape[1] // key.shape[1]
    for block in blocks:
        result, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _part(query, block.row, block.queries),
            _spread(_part(key, block.row, block.keys), sharing),
            _spread(_part(value, block.row, block.keys), sharing),
            0.0,
            block.is_causal,
            attn_mask=_as_added(block.seen, query.dtype),
            scale=scale,
        )
        before = log_sums[block.row, :, block.queries]
        joined = torch.logaddexp(before, log_sum[0].float())
        share_before = (before - joined).exp()[..., None]
        share_of_block = (log_sum[0].float() - joined).exp()[..., None]
        total = output[block.row, :, block.queries]
        total.mul_(share_before).add_(result[0].float() * share_of_block)
        before.copy_(joined)


class _Backward(NamedTuple):
    """What the gradients of a block follow from."""

    gradient: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    log_sums: Tensor
    scale: float

    def add(self, block: Block, of_query: Tensor, of_key: Tensor, of_value: Tensor) -> None:
        """Add a block's gradients to those of queries, keys and values, in place."""
        sharing = self.query.shape[1] // self.key.shape[1]
        row, queries, keys = block.row, block.queries, block.keys
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _part(self.gradient, row, queries),
            _part(self.query, row, queries),
            _spread(_part(self.key, row, keys), sharing),
            _spread(_part(self.value, row, keys), sharing),
            # Of all blocks of a query together.
            _part(self.output, row, queries),
            self.log_sums[row : row + 1, :, queries],
            0.0,
            block.is_causal,
            attn_mask=_as_added(block.seen, self.query.dtype),
            scale=self.scale,
        )
        _part(of_query, row, queries).add_(parts[0])
        # Heads that share a key each have a gradient for it.
        _part(of_key, row, keys).add_(parts[1].float().unflatten(1, (-1, sharing)).sum(2))
        _part(of_value, row, keys).add_(parts[2].float().unflatten(1, (-1, sharing)).sum(2))


def _passed_on(own: Tensor, group: ParallelGroup | None) -> Iterator[tuple[int, Tensor]]:
    """Yield each owner and its tensor as tensors go around the ranks: this rank's first.

    A rank yields later owners, too: it has nothing to do with their keys, but passes them on.
    """
    rank = _rank(group)
    ranks = group.size if group else 1
    held = own
    for turn in range(ranks):
        is_last = turn == ranks - 1
        # Sent while the one that is held is computed with.
        arriving = None if is_last else _to_next(held, group)
        yield (rank - turn) % ranks, held
        if arriving is not None:
            held = arriving()


def _to_next(tensor: Tensor, group: ParallelGroup | None) -> Callable[[], Tensor]:
    """Send a tensor to the next rank; return a function that waits for that of the rank before."""
    if group is None:
        return lambda: tensor
    peers = group.process_group
    arriving = torch.empty_like(tensor)
    sent = dist.isend(tensor, group=peers, group_dst=(group.rank + 1) % group.size)
    received = dist.irecv(arriving, group=peers, group_src=(group.rank - 1) % group.size)

    def wait() -> Tensor:
        for request in (received, sent):
            assert request is not None  # this rank is in the group
            request.wait()
        return arriving

    return wait


def _rank(group: ParallelGroup | None) -> int:
    return group.rank if group else 0


def _tokens_of(rank: int, tokens: int) -> range:
    """Return the tokens of a rank, each of which has ``tokens``."""
    return range(rank * tokens, (rank + 1) * tokens)


def _from(part: range, whole: range) -> slice:
    """Return ``part`` as a slice that counts from the first number of ``whole``."""
    return slice(part.start - whole.start, part.stop - whole.start)


def _part(tensor: Tensor, row: int, tokens: slice) -> Tensor:
    """Return some tokens of a row of ``(n, heads, tokens, size)``, as a batch of one row."""
    return tensor[row : row + 1, :, tokens]


def _spread(heads: Tensor, sharing: int) -> Tensor:
    """Repeat each head for the ``sharing`` queries that share it."""
    return heads if sharing == 1 else heads.repeat_interleave(sharing, 1)


def _as_added(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as the kernel adds it: 0 for a key that is seen, else minus infinity."""
    if seen is None:
        return None
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    return added[None, None]
