"""The rows of a micro-batch as one sequence of tokens, with groups of rows for attention."""

from __future__ import annotations

from dataclasses import dataclass
from sys import maxsize

import numpy as np
import torch
from torch import Tensor

from distcore.plugin.batching import TokenCut

GROUP_TOKENS = 96
"""Cost of one more group in attention, in tokens of padding; measured on a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Consecutive rows of like length in the sequence."""

    start: int
    """Place of the first token."""
    stop: int
    """Place after the last token."""
    rows: int
    """Number of rows."""
    longest: int
    """Tokens of the longest row."""
    numbers: Tensor
    """Number of each row in the micro-batch: int64 ``(rows,)``."""
    places: Tensor | None
    """Number in the group of the token at each place of the padded rows:
    int64 ``(rows * longest,)``.

    ``None`` if all rows have one length, and need no padding. Padding has the number of any token.
    """
    real: Tensor | None
    """Places of the padded rows with a real token: int64 ``(stop -
    start,)``; ``None`` like ``places``.
    """
    mask: Tensor | None
    """True at places with a real token: ``(rows, 1, 1, longest)``; ``None`` like ``places``."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds of all rows with at least one token."""

    begins: Tensor
    """Start of each row, and the end of the last one: int64 ``(rows + 1,)``."""
    shortest: int
    """Tokens of the shortest row."""
    longest: int
    """Tokens of the longest row."""


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """How the tokens of a decoder's sequence attend to those of its encoder's, in
    groups of the encoder's rows.
    """

    groups: tuple[Group, ...]
    """Groups of the encoder's sequence."""
    longest: tuple[int, ...]
    """Tokens of the longest row of the decoder in each group."""
    places: Tensor
    """Token of the decoder at each place of its padded rows, group by group: int64.
    Padding has any token.
    """
    back: Tensor
    """The place of each token of the decoder there: int64 ``(tokens,)``."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """A micro-batch as one sequence: the origins of its tokens, and the
    rows or groups for attention.
    """

    shape: tuple[int, int]
    """Rows and places of the padded micro-batch."""
    places: Tensor
    """Place of each token in the flattened padded micro-batch: int64 ``(tokens,)``.

    Those after the ``real`` ones repeat the first token. They are in no group, and in no result.
    """
    real: int
    """Number of tokens that the rows have."""
    offsets: Tensor
    """Number of each token in its row, from 0: int64 ``(tokens,)``."""
    rows: Tensor
    """Row of the micro-batch of each token: int64 ``(tokens,)``."""
    first: Tensor
    """Start of each row with a token, in the order of the sequence: int64
    ``(rows with a token,)``.
    """
    order: Tensor | None
    """Permutation of the sequence into the micro-batch's order, row by row;
    ``None`` for the identity.
    """
    groups: tuple[Group, ...]
    """Groups of all tokens, in order; empty if attention takes one call for all rows."""
    bounds: Bounds | None
    """Bounds of the rows; ``None`` with groups."""
    crossing: Crossing | None = None
    """How a decoder's sequence attends to its encoder's; ``None`` for a model of one of them."""

    def taken(self, padded: Tensor) -> Tensor:
        """Return the sequence's values, ``(1, tokens)``, from those of the
        padded micro-batch, ``(rows, places)``.

        Values may have further dimensions.
        """
        return padded.flatten(0, 1).index_select(0, self.places)[None]

    def padded(self, hidden: Tensor) -> Tensor:
        """Return ``(1, tokens, size)`` as ``(rows, places, size)``, with zeros as padding."""
        rows, places = self.shape
        zeros, real = hidden.new_zeros(rows * places, hidden.shape[-1]), slice(self.real)
        padded = zeros.index_copy(0, self.places[real], hidden[0, real])
        return padded.view(rows, places, -1)

    def firsts(self, hidden: Tensor) -> Tensor:
        """Return the first token of each row, ``(1, rows with a token, size)``,
        from ``(1, tokens, size)``.
        """
        return hidden.index_select(1, self.first)

    def by_row(self, firsts: Tensor) -> Tensor:
        """Return the result of ``firsts`` row by row, ``(rows, 1, size)``, with zeros for a
        row without a token.
        """
        rows = self.rows.index_select(0, self.first)
        return firsts.new_zeros(self.shape[0], firsts.shape[-1]).index_copy(0, rows, firsts[0])[
            :, None
        ]

    def in_order(self, hidden: Tensor) -> Tensor:
        """Return ``(1, tokens, size)`` in the order of the micro-batch, row by row."""
        return hidden[:, : self.real] if self.order is None else hidden.index_select(1, self.order)


def sequence_of(mask: Tensor, longest_at_once: int = 0, multiple: int = 1) -> TokenSequence:
    """Return the sequence of a micro-batch with this ``mask``, ``(rows, places)``,
    1 for real tokens.

    If no row has more than ``longest_at_once`` tokens, attention takes one call for all rows,
    instead of one per group of like length. With groups, repeated tokens make their number a
    ``multiple``.
    """
    on_cpu = mask.detach().cpu().numpy().astype(bool)
    lengths = on_cpu.sum(1)
    at_once = int(lengths.max(initial=0)) <= longest_at_once
    # Sorted by length, the rows of a group are consecutive, so that a group is a slice
    # of the sequence.
    rows = np.arange(len(lengths)) if at_once else np.argsort(lengths, kind="stable")
    sizes = lengths[rows]
    row, place = on_cpu[rows].nonzero()
    places = rows[row] * on_cpu.shape[1] + place
    ends = np.cumsum(sizes)
    offsets = np.arange(len(row)) - np.repeat(ends - sizes, sizes)
    order = None if (np.diff(places) > 0).all() else _tensor(np.argsort(places), mask)
    slices = [] if at_once else _slices(sizes)
    groups = tuple(_group(sizes[a:b], rows[a:b], int(ends[b - 1]), mask) for a, b in slices)
    first, real = (offsets == 0).nonzero()[0], len(places)
    bounds = _bounds(first, sizes[sizes > 0], mask) if at_once else None
    again = np.zeros(0 if at_once else -real % multiple, np.int64)
    places, offsets, owners = (
        _tensor(np.append(each, each[again]), mask) for each in (places, offsets, rows[row])
    )
    shape = (len(mask), mask.shape[1])
    return TokenSequence(
        shape, places, real, offsets, owners, _tensor(first, mask), order, groups, bounds
    )


def crossing_of(target: TokenSequence, source: TokenSequence) -> Crossing:
    """Return how the tokens of ``target`` attend to those of ``source``, which has a
    token in each row.
    """
    first = target.first.cpu().numpy()
    owners = target.rows.cpu().numpy()[first]
    begins, sizes = np.zeros((2, target.shape[0]), np.int64)
    begins[owners], sizes[owners] = first, np.diff(first, append=target.real)
    longest, places, back, done = [], [], np.zeros(len(target.places), np.int64), 0
    for group in source.groups:
        rows = group.numbers.cpu().numpy()
        longest.append(max(1, int(sizes[rows].max())))
        offsets = np.arange(longest[-1])
        own = begins[rows][:, None] + np.minimum(offsets, np.maximum(sizes[rows] - 1, 0)[:, None])
        real = (offsets < sizes[rows][:, None]).reshape(-1)
        back[own.reshape(-1)[real]] = done + real.nonzero()[0]
        places.append(own.reshape(-1))
        done += own.size
    like = target.places
    return Crossing(
        source.groups, tuple(longest), _tensor(np.concatenate(places), like), _tensor(back, like)
    )


def _bounds(first: np.ndarray, sizes: np.ndarray, like: Tensor) -> Bounds:
    return Bounds(_tensor(np.append(first, sizes.sum()), like), int(sizes.min()), int(sizes.max()))


def _slices(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Cut rows, sorted by length, into groups. Rows without a token are in no group."""
    empty = int((lengths == 0).sum())
    cut = TokenCut(tokens=maxsize, forward=GROUP_TOKENS, rows=maxsize)
    slices = cut.assign(lengths[empty:], 1)[:, 0] + empty
    return sorted((int(first), int(stop)) for first, stop in slices if first < stop)


def _group(lengths: np.ndarray, numbers: np.ndarray, stop: int, like: Tensor) -> Group:
    rows, longest, start = len(lengths), int(lengths[-1]), stop - int(lengths.sum())
    if lengths[0] == longest:
        return Group(start, stop, rows, longest, _tensor(numbers, like), None, None, None)
    mask = np.arange(longest) < lengths[:, None]
    begins = np.cumsum(lengths) - lengths
    # A place of padding takes the token after its row, or the group's last one. The mask hides it.
    places = np.minimum(begins[:, None] + np.arange(longest), stop - start - 1).reshape(-1)
    real = mask.reshape(-1).nonzero()[0]
    return Group(
        start,
        stop,
        rows,
        longest,
        _tensor(numbers, like),
        _tensor(places, like),
        _tensor(real, like),
        _tensor(mask[:, None, None], like),
    )


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
