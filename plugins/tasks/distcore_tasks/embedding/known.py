"""Texts that are no negatives of a row, although they are in its batch.

A text counts as known to an anchor if any row pairs it with the same anchor, or if it is the anchor
itself. Texts are the same if their tokens are, because then no encoder can tell them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distcore_tasks.embedding.dataset import HALF

if TYPE_CHECKING:
    from torch import Tensor


def text_numbers(same: Tensor) -> Tensor:
    """Return numbers from 0, one for all texts of the same digest: ``(n, m, 2)`` in halves
    gives int64 ``(n, m)``.
    """
    import torch

    halves = same.long()
    numbers: Tensor = torch.unique(halves[..., 0] * 2**HALF + halves[..., 1], return_inverse=True)[
        1
    ]
    return numbers


def are_known(rows: Tensor, anchors: Tensor, positives: Tensor, texts: Tensor) -> Tensor:
    """Return whether each of the ``texts``, ``(m,)``, is known to the anchors of the
    ``rows``, ``(k,)``: ``(k, m)``.

    ``anchors`` and ``positives``: the numbers of the texts of all rows, ``(n,)``.
    """
    import torch

    groups, group = torch.unique(anchors[rows], return_inverse=True)
    place = torch.searchsorted(groups, anchors.contiguous()).clamp(max=len(groups) - 1)
    is_here = groups[place] == anchors
    most = int(torch.cat([anchors, positives, texts]).max())
    table = torch.zeros(len(groups), most + 1, dtype=torch.bool, device=anchors.device)
    table[place[is_here], positives[is_here]] = True
    table[torch.arange(len(groups), device=groups.device), groups] = True
    known: Tensor = table[group][:, texts]
    return known
