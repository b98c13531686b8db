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
    """Token of the group at each place of its padded rows: int64 ``(rows * longest,)``.

    ``None`` if all rows have one length, and need no padding. Padding has the number of any token.
    """
    real: Tensor | None
    """Places of the padded rows with a real token: int64 ``(stop - start,)``.

    ``None`` like ``places``.
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
    """Attention of a decoder's tokens to its encoder's, in groups of the encoder's rows."""

    groups: tuple[Group, ...]
    """Groups of the encoder's sequence."""
    longest: tuple[int, ...]
    """Tokens of the longest row of the decoder in each group."""
    places: Tensor
    """Token of the decoder at each place of its padded rows, group by group: int64.

    Padding has any token.
    """
    back: Tensor
    """Place of each token of the decoder in these padded rows: int64 ``(tokens,)``."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """A micro-batch as one sequence: where its tokens come from, and how they attend."""

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
    """Start of each row with a token, in the sequence's order: int64 ``(rows with a token,)``."""
    order: Tensor | None
    """Permutation of the sequence into the micro-batch's order, row by row.

    ``None`` for the identity.
    """
    groups: tuple[Group, ...]
    """Groups of all tokens, in order; empty if attention takes one call for all rows."""
    bounds: Bounds | None
    """Bounds of the rows; ``None`` with groups."""
    crossing: Crossing | None = None
    """How a decoder's sequence attends to its encoder's; ``None`` for a model of one of them."""

    def taken(self, padded: Tensor) -> Tensor:
        """Return values of the padded micro-batch, ``(rows, places)``, as ``(1, tokens)``.

        Values may have further dimensions.
        """
        return padded.flatten(0, 1).index_select(0, self.places)[None]

    def padded(self, hidden: Tensor) -> Tensor:
        """Return ``(1, tokens, size)`` as ``(rows, places, size)``, with zeros as padding."""
        rows, places = self.shape
        zeros = hidden.new_zeros(rows * places, hidden.shape[-1])
        padded = zeros.index_copy(0, self.places[: self.real], hidden[0, : self.real])
        return padded.view(rows, places, -1)

    def firsts(self, hidden: Tensor) -> Tensor:
        """Return the first tokens of ``(1, tokens, size)``: ``(1, rows with a token, size)``."""
        return hidden.index_select(1, self.first)

    def by_row(self, firsts: Tensor) -> Tensor:
        """Return the result of ``firsts`` in the order of the micro-batch, ``(rows, 1, size)``.

        A row without a token has zeros.
        """
        rows = self.rows.index_select(0, self.first)
        zeros = firsts.new_zeros(self.shape[0], firsts.shape[-1])
        return zeros.index_copy(0, rows, firsts[0])[:, None]

    def in_order(self, hidden: Tensor) -> Tensor:
        """Return ``(1, tokens, size)`` in the order of the micro-batch, row by row."""
        if self.order is None:
            return hidden[:, : self.real]
        return hidden.index_select(1, self.order)


def sequence_of(mask: Tensor, longest_at_once: int = 0, multiple: int = 1) -> TokenSequence:
    """Return the sequence of a micro-batch; ``mask``, ``(rows, places)``, is 1 for real tokens.

    If no row has more than ``longest_at_once`` tokens, attention takes one call for all rows,
    instead of one per group of like length. With groups, repeated tokens make their number a
    ``multiple``.
    """
    on_cpu = mask.detach().cpu().numpy().astype(bool)
    lengths = on_cpu.sum(1)
    at_once = int(lengths.max(initial=0)) <= longest_at_once
    # Sorted by length, the rows of a group are consecutive, so that a group is a slice
    # of the sequence.
    row_order = np.arange(len(lengths)) if at_once else np.argsort(lengths, kind="stable")
    sizes = lengths[row_order]
    # Row and column of each token, in the order of the sequence.
    row, column = on_cpu[row_order].nonzero()
    rows = row_order[row]
    places = rows * on_cpu.shape[1] + column
    ends = np.cumsum(sizes)
    offsets = np.arange(len(rows)) - np.repeat(ends - sizes, sizes)
    first = (offsets == 0).nonzero()[0]
    is_in_order = bool((np.diff(places) > 0).all())
    order = None if is_in_order else _tensor(np.argsort(places), mask)
    real = len(places)

    groups: list[Group] = []
    bounds: Bounds | None = None
    repeated = np.zeros(0, np.int64)  # numbers of the tokens to repeat at the end
    if at_once:
        bounds = _bounds(first, sizes[sizes > 0], mask)
    else:
        for start, stop in _slices(sizes):
            last_token = int(ends[stop - 1])
            groups.append(_group(sizes[start:stop], row_order[start:stop], last_token, mask))
        repeated = np.zeros(-real % multiple, np.int64)
    return TokenSequence(
        shape=(len(mask), mask.shape[1]),
        places=_tensor(np.append(places, places[repeated]), mask),
        real=real,
        offsets=_tensor(np.append(offsets, offsets[repeated]), mask),
        rows=_tensor(np.append(rows, rows[repeated]), mask),
        first=_tensor(first, mask),
        order=order,
        groups=tuple(groups),
        bounds=bounds,
    )


def crossing_of(target: TokenSequence, source: TokenSequence) -> Crossing:
    """Return how the tokens of ``target`` attend to those of ``source``.

    ``source`` has a token in each row.
    """
    # Start and length of each row of the decoder, by its number in the micro-batch; a row
    # without a token has zeros.
    first = target.first.cpu().numpy()
    rows_with_token = target.rows.cpu().numpy()[first]
    begins, lengths = np.zeros((2, target.shape[0]), np.int64)
    begins[rows_with_token] = first
    lengths[rows_with_token] = np.diff(first, append=target.real)

    longest_of_groups, places = [], []
    back = np.zeros(len(target.places), np.int64)
    padded_tokens = 0
    for group in source.groups:
        rows = group.numbers.cpu().numpy()
        row_begins, row_lengths = begins[rows][:, None], lengths[rows][:, None]
        longest = max(1, int(row_lengths.max()))
        offsets = np.arange(longest)
        # Padding repeats the last token of its row.
        tokens = row_begins + np.minimum(offsets, np.maximum(row_lengths - 1, 0))
        is_real = (offsets < row_lengths).reshape(-1)
        back[tokens.reshape(-1)[is_real]] = padded_tokens + is_real.nonzero()[0]
        longest_of_groups.append(longest)
        places.append(tokens.reshape(-1))
        padded_tokens += tokens.size
    return Crossing(
        groups=source.groups,
        longest=tuple(longest_of_groups),
        places=_tensor(np.concatenate(places), target.places),
        back=_tensor(back, target.places),
    )


def _bounds(first: np.ndarray, sizes: np.ndarray, like: Tensor) -> Bounds:
    """Return the bounds of rows with these starts and ``sizes``, none of them 0."""
    begins = np.append(first, sizes.sum())
    return Bounds(_tensor(begins, like), int(sizes.min()), int(sizes.max()))


def _slices(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Cut rows, sorted by length, into groups. Rows without a token are in no group."""
    empty = int((lengths == 0).sum())
    cut = TokenCut(tokens=maxsize, forward=GROUP_TOKENS, rows=maxsize)
    slices = cut.assign(lengths[empty:], 1)[:, 0] + empty
    return sorted((int(first), int(stop)) for first, stop in slices if first < stop)


def _group(lengths: np.ndarray, numbers: np.ndarray, stop: int, like: Tensor) -> Group:
    """Return the group of the rows ``numbers``, whose ``lengths`` ascend.

    ``stop`` is the place in the sequence after its last token; ``like`` has the device.
    """
    longest = int(lengths[-1])
    tokens = int(lengths.sum())
    places = real = mask = None
    if lengths[0] < longest:
        is_real = np.arange(longest) < lengths[:, None]
        begins = np.cumsum(lengths) - lengths
        # A place of padding takes the token after its row, or the group's last one. The mask
        # hides it.
        token_of_place = np.minimum(begins[:, None] + np.arange(longest), tokens - 1)
        places = _tensor(token_of_place.reshape(-1), like)
        real = _tensor(is_real.reshape(-1).nonzero()[0], like)
        mask = _tensor(is_real[:, None, None], like)
    return Group(
        start=stop - tokens,
        stop=stop,
        rows=len(lengths),
        longest=longest,
        numbers=_tensor(numbers, like),
        places=places,
        real=real,
        mask=mask,
    )


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    """Return a tensor of ``array`` on the device of ``like``."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
