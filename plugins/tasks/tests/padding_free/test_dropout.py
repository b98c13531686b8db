"""With dropout each model type has one answer: with and without padding, in one
micro-batch and in many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from padding_free_models import CASES, FEW, LENGTHS, batch, labels_of, model_of
from row_mask_cases import RUN, forward_of, with_dropout
from torch import Tensor

from distcore.model import RowMasks
from distcore.model.row_dropout import use_row_masks
from distcore_tasks.padding_free import layer_hooks
from distcore_tasks.padding_free.layer_hooks import enable_padding_free
from distcore_tasks.padding_free.supported_models import HEADS, HeadName
from distcore_tasks.shared.target_logits import logits_of_tokens

pytestmark = pytest.mark.programs  # half a minute of computing is too long for the quick suite
ROWS = np.arange(100, 100 + len(LENGTHS))
"""Numbers of the rows in a dataset."""


@pytest.fixture
def masks() -> Iterator[RowMasks]:
    with use_row_masks(RUN) as made:
        assert made is not None
        yield made


def answers(head: HeadName, model: Any, cuts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Logits of rows or tokens, row by row, and the gradient of a weighted sum of
    all, over micro-batches ``cuts``.
    """
    tokens, mask = batch()
    labels = labels_of(tokens, mask)
    model.zero_grad()
    made: list[Tensor] = []
    for rows in cuts:
        places = slice(max(LENGTHS[row] for row in rows))
        ids, seen = tokens[rows][:, places], mask[rows][:, places]
        targets = {"labels": labels[rows]} if head == "decoder" else {}
        with forward_of(ROWS[rows]):
            logits = model(input_ids=ids, attention_mask=seen, **targets)[
                0 if head != "decoder" else "logits"
            ]
        read = targets["labels"] != -100 if targets else seen
        logits = logits if head == "row classifier" else logits_of_tokens(logits, read)
        per_row = [1] * len(rows) if head == "row classifier" else read.sum(1).tolist()
        parts = logits.split(per_row)
        made += [part.detach() for part in parts]
        weights = [
            torch.randn(part.shape, generator=torch.Generator().manual_seed(row))
            for row, part in zip(rows, parts, strict=True)
        ]
        (logits * torch.cat(weights)).sum().backward()
    order = [row for rows in cuts for row in rows]
    gradients = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]
    return torch.cat([made[order.index(row)] for row in range(len(LENGTHS))]), torch.cat(gradients)


WHOLE = [list(range(len(LENGTHS)))]
CUT = [[5], [0, 7, 1], [2, 3, 4, 6]]


@pytest.mark.parametrize(
    ("head", "kind"),
    [pytest.param(*case, marks=() if case[1] in FEW else pytest.mark.slow) for case in CASES],
)
def test_masks_follow_from_the_row(
    masks: RowMasks, head: HeadName, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_dropout(model_of(head, kind), 0.2)
    logits, gradient = answers(head, model, WHOLE)
    assert masks.outside is None
    off = model_of(head, kind)
    # dropout is on
    assert (answers(head, off, WHOLE)[0] - logits).abs().max() > 1e-2 * logits.abs().max()
    model.gradient_checkpointing_enable()
    close(answers(head, model, CUT), (logits, gradient))
    enable_padding_free(model, read=HEADS[head].reads)
    close(answers(head, model, WHOLE), (logits, gradient))
    close(answers(head, model, CUT), (logits, gradient))
    monkeypatch.setattr(layer_hooks, "_is_low_precision", lambda *_: True)
    close(answers(head, model, CUT), (logits, gradient))
    assert masks.outside is None
    assert not masks.is_new


def close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() < 2e-6 * other.norm()
