"""The rows of a micro-batch as one sequence of tokens, and the groups of rows in it that attend together."""

from __future__ import annotations

from dataclasses import dataclass
from sys import maxsize

import numpy as np
import torch
from torch import Tensor

from distcore import TokenCut

GROUP_TOKENS = 96
"""The cost of one more group in attention, in tokens of padding, on a CPU; about as much was measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows of like length that follow each other in the sequence."""

    start: int
    """Place of its first token."""
    stop: int
    """Place behind its last one."""
    rows: int
    """How many rows it has."""
    longest: int
    """Tokens of its longest row."""
    places: Tensor | None
    """Which of its own tokens stands at each place of its rows, padded: int64 ``(rows * longest,)``.

    ``None`` if all rows are of one length, so that nothing pads them. At padding stands any token.
    """
    real: Tensor | None
    """The places of its rows, padded, that are no padding: int64 ``(stop - start,)``; ``None`` like ``places``."""
    mask: Tensor | None
    """True where a place is no padding: ``(rows, 1, 1, longest)``; ``None`` like ``places``."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Rows that follow each other in the sequence, none of them without a token."""

    begins: Tensor
    """Where each begins, and behind them where the last ends: int64 ``(rows + 1,)``."""
    shortest: int
    """Tokens of the shortest."""
    longest: int
    """Tokens of the longest."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """A micro-batch as one sequence: where its tokens come from, and which of them attend to each other."""

    shape: tuple[int, int]
    """Rows and places of the padded micro-batch."""
    places: Tensor
    """Where each token of the sequence stands in the padded micro-batch, flattened: int64 ``(tokens,)``."""
    offsets: Tensor
    """Number of each token in its row, from 0: int64 ``(tokens,)``."""
    first: Tensor
    """Where in the sequence each row that has a token begins, in its order: int64 ``(rows with a token,)``."""
    order: Tensor | None
    """Which token of the sequence is the k-th of the micro-batch, row by row; ``None`` if it is the k-th."""
    groups: tuple[Group, ...]
    """All tokens of the sequence, in order; none where rows attend at once."""
    bounds: Bounds | None
    """The rows; ``None`` where they attend in groups."""

    def taken(self, padded: Tensor) -> Tensor:
        """Return values of the padded micro-batch, ``(rows, places)``, as those of the sequence, ``(1, tokens)``."""
        return padded.flatten().index_select(0, self.places)[None]

    def padded(self, hidden: Tensor) -> Tensor:
        """Return ``(1, tokens, size)`` as ``(rows, places, size)``, with zeros as padding."""
        rows, places = self.shape
        padded = hidden.new_zeros(rows * places, hidden.shape[-1]).index_copy(0, self.places, hidden[0])
        return padded.view(rows, places, -1)

    def firsts(self, hidden: Tensor) -> Tensor:
        """Return of ``(1, tokens, size)`` the first token of each row: ``(1, rows with a token, size)``."""
        return hidden.index_select(1, self.first)

    def by_row(self, firsts: Tensor) -> Tensor:
        """Return the result of ``firsts`` as ``(rows, 1, size)``, row by row, with zeros for a row without a token."""
        rows = self.places.index_select(0, self.first) // self.shape[1]
        return firsts.new_zeros(self.shape[0], firsts.shape[-1]).index_copy(0, rows, firsts[0])[:, None]

    def in_order(self, hidden: Tensor) -> Tensor:
        """Return ``(1, tokens, size)`` in the order of the micro-batch, row by row."""
        return hidden if self.order is None else hidden.index_select(1, self.order)


def sequence_of(mask: Tensor, at_once: bool = False) -> TokenSequence:
    """Return the sequence of a micro-batch whose ``mask``, ``(rows, places)``, is 1 where a place is no padding.

    ``at_once``: all its rows attend in one call, and not in groups of like length.
    """
    on_cpu = mask.detach().cpu().numpy().astype(bool)
    lengths = on_cpu.sum(1)
    rows = np.arange(len(lengths)) if at_once else np.argsort(lengths, kind="stable")
    sizes = lengths[rows]
    row, place = on_cpu[rows].nonzero()
    places = rows[row] * on_cpu.shape[1] + place
    ends = np.cumsum(sizes)
    offsets = np.arange(len(row)) - np.repeat(ends - sizes, sizes)
    order = None if (np.diff(places) > 0).all() else _tensor(np.argsort(places), mask)
    slices = [] if at_once else _slices(sizes)
    groups = tuple(_group(sizes[a:b], int(ends[b - 1]), mask) for a, b in slices)
    first = (offsets == 0).nonzero()[0]
    bounds = _bounds(first, sizes[sizes > 0], mask) if at_once else None
    places, offsets, first = (_tensor(array, mask) for array in (places, offsets, first))
    return TokenSequence((len(mask), mask.shape[1]), places, offsets, first, order, groups, bounds)


def _bounds(first: np.ndarray, sizes: np.ndarray, like: Tensor) -> Bounds:
    return Bounds(_tensor(np.append(first, sizes.sum()), like), int(sizes.min()), int(sizes.max()))


def _slices(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return which rows, in ascending order of length, attend together; rows without a token are in none."""
    empty = int((lengths == 0).sum())
    cut = TokenCut(tokens=maxsize, forward=GROUP_TOKENS, rows=maxsize)
    slices = cut.assign(lengths[empty:], 1)[:, 0] + empty
    return sorted((int(first), int(stop)) for first, stop in slices if first < stop)


def _group(lengths: np.ndarray, stop: int, like: Tensor) -> Group:
    rows, longest, start = len(lengths), int(lengths[-1]), stop - int(lengths.sum())
    if lengths[0] == longest:
        return Group(start, stop, rows, longest, None, None, None)
    mask = np.arange(longest) < lengths[:, None]
    begins = np.cumsum(lengths) - lengths
    places = np.minimum(begins[:, None] + np.arange(longest), stop - start - 1).reshape(-1)
    real = mask.reshape(-1).nonzero()[0]
    return Group(
        start, stop, rows, longest, _tensor(places, like), _tensor(real, like), _tensor(mask[:, None, None], like)
    )


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
