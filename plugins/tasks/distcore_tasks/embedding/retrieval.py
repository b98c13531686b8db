"""Retrieval: the rank of each row's positive among all positives, and metrics of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distcore_tasks.embedding.known import are_known

if TYPE_CHECKING:
    from torch import Tensor

SCORES = 2**24
"""Most similarities in memory at a time."""


def ranks(anchors: Tensor, positives: Tensor, numbers: Tensor, scores: int = SCORES) -> Tensor:
    """Return the rank, from 1, of each row's positive by similarity to the anchor, int64 ``(n,)``.

    It competes with all distinct positives but those known to the anchor. Of equal similarities it
    is the last, so that a model that gives the same embedding to all texts has no success.
    ``numbers``: those of the texts of each row, ``(n, 2)`` or more; ``scores``: most similarities
    in memory at a time.
    """
    import torch

    anchor, positive = numbers[:, 0], numbers[:, 1]
    # A text that is the positive of several rows competes once.
    texts, column = torch.unique(positive, return_inverse=True)
    all_rows = torch.arange(len(anchor))
    none_yet = torch.full_like(texts, len(anchor))
    first_row = none_yet.scatter_reduce_(0, column, all_rows, "amin")
    corpus = positives[first_row]
    ranks_of_parts = []
    rows_at_once = max(1, scores // len(texts))
    for start in range(0, len(anchor), rows_at_once):
        rows = all_rows[start : start + rows_at_once]
        similarity = anchors[rows] @ corpus.T
        own_column = column[rows][:, None]
        is_known = are_known(rows, anchor, positive, texts).scatter_(1, own_column, False)
        # False for what is not a number, which so never helps a model.
        is_behind = similarity < similarity.gather(1, own_column)
        ranks_of_parts.append((~(is_behind | is_known)).sum(1))
    return torch.cat(ranks_of_parts)


def metrics(ranks: Tensor) -> dict[str, float]:
    """Return the mean over rows of each metric of ``options.RETRIEVAL``.

    A row has one right answer, so an ideal ranking has a gain of 1.
    """
    rank = ranks.double()
    is_near = (rank <= 10).double()
    return {
        "accuracy_at_1": (rank == 1).double().mean().item(),
        "recall_at_10": is_near.mean().item(),
        "mrr_at_10": (is_near / rank).mean().item(),
        "ndcg_at_10": (is_near / (1 + rank).log2()).mean().item(),
    }
