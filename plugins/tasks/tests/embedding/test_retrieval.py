"""Retrieval: ranks among distinct positives, ties at the end, in parts of any size;
metrics by their definitions.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from distcore_tasks.embedding.retrieval import metrics, ranks


@pytest.mark.parametrize("scores", [1, 7, 2**24])
def test_a_rank_counts_other_texts_that_are_as_near(scores: int) -> None:
    torch.manual_seed(0)
    anchors, positives = (normalize(torch.randn(40, 8), dim=-1) for _ in range(2))
    numbers = torch.stack([torch.arange(40), torch.arange(40) + 40], 1)
    similar = anchors @ positives.T
    expected = (similar >= similar.diagonal()[:, None]).sum(1)
    assert torch.equal(ranks(anchors, positives, numbers, scores), expected)


def test_equal_positives_are_one_text_and_others_of_the_anchor_do_not_compete() -> None:
    anchors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    positives = torch.tensor([[0.6, 0.8], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
    # Rows 0 and 1 have one anchor; rows 0 and 2 have one positive.
    assert ranks(anchors, positives, torch.tensor([[0, 5], [0, 6], [1, 5], [2, 7]])).tolist() == [
        1,
        1,
        2,
        1,
    ]
    assert ranks(anchors, positives, torch.tensor([[0, 5], [3, 6], [1, 5], [2, 7]])).tolist() == [
        2,
        1,
        2,
        1,
    ]


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_model_without_a_choice_has_no_success(value: float) -> None:
    same = torch.full((5, 2), value)
    assert ranks(same, same, torch.arange(10).view(5, 2)).tolist() == [5] * 5


def test_metrics_are_means_over_rows() -> None:
    given = metrics(torch.tensor([1, 2, 10, 11]))
    assert given == {
        "accuracy_at_1": 0.25,
        "recall_at_10": 0.75,
        "mrr_at_10": pytest.approx((1 + 1 / 2 + 1 / 10) / 4),
        "ndcg_at_10": pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(11)) / 4),
    }
