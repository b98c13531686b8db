"""The table of classes is scikit-learn's."""

from __future__ import annotations

import pytest
import torch
from sklearn import metrics

from distcore_tasks.shared.classification.table import class_scores


@pytest.mark.parametrize("rows", [7, 40, 300])
@pytest.mark.parametrize(
    "classes", [["no", "yes"], ["a", "b", "c", "a class with a very long name", "never seen"]]
)
def test_scores_and_table_are_those_of_scikit_learn(classes: list[str], rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    label = torch.randint(max(2, len(classes) - 1), (rows,), generator=generator)
    prediction = torch.randint(max(2, len(classes) - 1), (rows,), generator=generator)
    scores = class_scores(label, prediction, len(classes))
    both, named = (
        (label.numpy(), prediction.numpy()),
        {"labels": range(len(classes)), "zero_division": 0},
    )
    expected = metrics.precision_recall_fscore_support(*both, **named)
    for ours, theirs in zip(
        (scores.precision, scores.recall, scores.f1, scores.support), expected, strict=True
    ):
        assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-15)
    assert scores.accuracy == pytest.approx(metrics.accuracy_score(*both), abs=1e-15)
    assert scores.table(classes) == metrics.classification_report(
        *both, **named, target_names=classes, digits=4
    )
