"""Retrieval: the rank of each row's positive among all positives, and metrics of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distcore_tasks.embedding.known import are_known

if TYPE_CHECKING:
    from torch import Tensor

SCORES = 2**24
"""Most similarities in memory at a time."""


def ranks(anchors: Tensor, positives: Tensor, numbers: Tensor, scores: int = SCORES) -> Tensor:
    """Return the rank, from 1, of each row's positive by its similarity to
    the anchor, int64 ``(n,)``.

    It competes with all distinct positives but those known to the anchor. Of equal similarities it
    is the last, so
    that a model that gives the same embedding to all texts has no success. ``numbers``: those of
    the texts of each row, ``(n, 2)`` or more; ``scores``: most similarities in memory at a time.
    """
    import torch

    anchor, positive = numbers[:, 0], numbers[:, 1]
    texts, column = torch.unique(positive, return_inverse=True)
    every = torch.arange(len(anchor))
    first = torch.full_like(texts, len(anchor)).scatter_reduce_(0, column, every, "amin")
    corpus = positives[first]
    parts, step = [], max(1, scores // len(texts))
    for start in range(0, len(anchor), step):
        rows = every[start : start + step]
        similar, own = anchors[rows] @ corpus.T, column[rows][:, None]
        known = are_known(rows, anchor, positive, texts).scatter_(1, own, False)
        behind = similar < similar.gather(1, own)  # false for what is not a number
        parts.append((~(behind | known)).sum(1))
    return torch.cat(parts)


def metrics(ranks: Tensor) -> dict[str, float]:
    """Return the mean over rows of each metric of ``options.RETRIEVAL``; a row
    has one right answer.
    """
    rank = ranks.double()
    is_near = (rank <= 10).double()
    return {
        "accuracy_at_1": (rank == 1).double().mean().item(),
        "recall_at_10": is_near.mean().item(),
        "mrr_at_10": (is_near / rank).mean().item(),
        "ndcg_at_10": (is_near / (1 + rank).log2()).mean().item(),
    }
