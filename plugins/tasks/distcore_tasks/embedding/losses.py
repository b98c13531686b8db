"""InfoNCE over a whole batch, for whole embeddings or Matryoshka sizes.

Without equal texts in a batch the losses are those of sentence-transformers:
``MultipleNegativesRankingLoss``, ``MultipleNegativesSymmetricRankingLoss``, and ``MatryoshkaLoss``
over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distcore_tasks.embedding.known import are_known, text_numbers
from distcore_tasks.embedding.options import EmbeddingOptions

if TYPE_CHECKING:
    from torch import Tensor


def row_losses(options: EmbeddingOptions, embeddings: Sequence[Tensor], same: Tensor) -> Tensor:
    """Return the loss of each row of a batch, fp32 ``(n,)``.

    ``embeddings``: those of anchors, positives and, if rows have one, negatives, each ``(n, size)``
    of length 1; ``same``: digests of the texts, ``(n, texts of a row, 2)``.
    """
    import torch
    from torch.nn.functional import normalize

    numbers = text_numbers(same)
    anchors, positives = numbers[:, 0], numbers[:, 1]
    rows = torch.arange(len(anchors), device=anchors.device)
    # Positives of all rows, then their negatives.
    others = numbers[:, 1:].T.flatten()
    # A text that is known to belong to the anchor is no wrong answer.
    is_hidden = are_known(rows, anchors, positives, others)
    is_hidden.fill_diagonal_(False)  # a row's own positive
    losses = embeddings[0].new_zeros(len(anchors))
    for size in options.dims or (embeddings[0].shape[-1],):
        columns = list(embeddings)
        if options.dims:
            columns = [normalize(column[:, :size], dim=-1) for column in embeddings]
        losses = losses + _losses(options, columns[0], torch.cat(columns[1:]), is_hidden)
    return losses


def _losses(
    options: EmbeddingOptions, anchors: Tensor, others: Tensor, is_hidden: Tensor
) -> Tensor:
    """Return the loss of each row at one size; ``others`` are positives, then negatives."""
    logits = options.scale * (anchors @ others.T).float()
    logits = logits.masked_fill(is_hidden, float("-inf"))
    totals = logits.logsumexp(1)
    if options.symmetric:
        # The other way round: each positive looks for its anchor.
        totals = (totals + logits[:, : len(anchors)].logsumexp(0)) / 2
    return totals - logits.diagonal()
