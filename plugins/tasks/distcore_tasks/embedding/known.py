"""Texts that are no negatives of a row, although they are in its batch.

A text counts as known to an anchor if any row pairs it with the same anchor, or if it is the anchor
itself. Texts are the same if their tokens are, because then no encoder can tell them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HALF = 24
"""Bits of a half of a text's digest: fp32, in which rows are gathered, holds them exactly."""


def text_numbers(same: Tensor) -> Tensor:
    """Return numbers from 0, int64 ``(n, m)``: equal ones for texts of the same digest.

    ``same`` has the digests in halves, ``(n, m, 2)``.
    """
    import torch

    halves = same.long()
    digests = halves[..., 0] * 2**HALF + halves[..., 1]
    numbers: Tensor
    _, numbers = torch.unique(digests, return_inverse=True)
    return numbers


def are_known(rows: Tensor, anchors: Tensor, positives: Tensor, texts: Tensor) -> Tensor:
    """Return whether each of the ``texts``, ``(m,)``, is known to the anchors of the
    ``rows``, ``(k,)``: ``(k, m)``.

    ``anchors`` and ``positives``: the numbers of the texts of all rows, ``(n,)``.
    """
    import torch

    # A row of the table for each different anchor: equal anchors know the same texts.
    distinct, line_of_row = torch.unique(anchors[rows], return_inverse=True)
    line = torch.searchsorted(distinct, anchors.contiguous()).clamp(max=len(distinct) - 1)
    # False for anchors of other rows, which the search puts at any place.
    is_wanted = distinct[line] == anchors
    largest = int(torch.cat([anchors, positives, texts]).max())
    table = torch.zeros(len(distinct), largest + 1, dtype=torch.bool, device=anchors.device)
    table[line[is_wanted], positives[is_wanted]] = True
    # An anchor knows itself.
    table[torch.arange(len(distinct), device=distinct.device), distinct] = True
    known: Tensor = table[line_of_row][:, texts]
    return known
