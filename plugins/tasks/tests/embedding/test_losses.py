"""The loss is its formula, written for one row after the other; texts that belong to an
anchor are no negatives.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from distcore_tasks.embedding.known import are_known, text_numbers
from distcore_tasks.embedding.losses import row_losses
from distcore_tasks.embedding.task import Embedding

ROWS = [
    ("a", "p", "x"),
    ("b", "q", "p"),
    ("c", "p", "y"),
    ("a", "r", "c"),
    ("d", "a", "z"),
    ("e", "s", "q"),
]
"""Anchor, positive and negative of each row."""


def digests(rows: list[tuple[str, ...]]) -> Tensor:
    return torch.tensor([[(0, ord(text)) for text in row] for row in rows])


def embedded(rows: int, columns: int, size: int = 12) -> list[Tensor]:
    torch.manual_seed(0)
    return [normalize(torch.randn(rows, size, dtype=torch.float64), dim=-1) for _ in range(columns)]


def formula(options: Embedding, embeddings: list[Tensor], rows: list[tuple[str, ...]]) -> Tensor:
    """The loss of each row, by sums over what may be a negative."""
    known = {(anchor, positive) for anchor, positive, *_ in rows} | {
        (anchor, anchor) for anchor, *_ in rows
    }
    losses = []
    for at in range(len(rows)):
        total = torch.zeros((), dtype=torch.float64)
        for size in options.dims or (embeddings[0].shape[1],):
            anchors, *others = (
                each[:, :size] / each[:, :size].norm(dim=-1, keepdim=True) for each in embeddings
            )
            own = options.scale * anchors[at] @ others[0][at]
            seen = own.exp()
            for column, other in product(range(len(others)), range(len(rows))):
                is_own = column == 0 and other == at
                if not is_own and (rows[at][0], rows[other][column + 1]) not in known:
                    seen = seen + (options.scale * anchors[at] @ others[column][other]).exp()
            back = own.exp()
            for other in range(len(rows)):
                if other != at and (rows[other][0], rows[at][1]) not in known:
                    back = back + (options.scale * anchors[other] @ others[0][at]).exp()
            total = (
                total + (((seen.log() + back.log()) / 2) if options.symmetric else seen.log()) - own
            )
        losses.append(total)
    return torch.stack(losses)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dims", [(), (8, 4)])
def test_the_loss_of_each_row_is_the_formula(
    columns: int, symmetric: bool, dims: tuple[int, ...]
) -> None:
    task = Embedding(scale=7.0, symmetric=symmetric, dims=dims)
    rows: list[tuple[str, ...]] = [row[:columns] for row in ROWS]
    embeddings = embedded(len(rows), columns)
    given = row_losses(task, [each.float() for each in embeddings], digests(rows))
    torch.testing.assert_close(
        given.double(), formula(task, embeddings, rows), rtol=1e-5, atol=1e-6
    )


def test_a_known_positive_of_an_anchor_is_no_negative() -> None:
    numbers = text_numbers(digests([row[:2] for row in ROWS]))
    known = are_known(torch.arange(6), numbers[:, 0], numbers[:, 1], numbers[:, 1])
    texts = [row[1] for row in ROWS]
    of = {"a": {"p", "r", "a"}, "b": {"q"}, "c": {"p"}, "d": {"a"}, "e": {"s"}}
    assert known.tolist() == [[text in of[row[0]] for text in texts] for row in ROWS]
    some = torch.tensor([4, 3])  # a part of the rows knows what all rows say
    assert torch.equal(are_known(some, numbers[:, 0], numbers[:, 1], numbers[:, 1]), known[some])


def test_an_equal_text_in_another_row_changes_neither_loss_nor_gradient() -> None:
    """Two rows with one positive: each has the loss that it has without the other."""

    def gradient(rows: list[tuple[str, ...]], keep: list[int]) -> tuple[float, Tensor]:
        leaves: list[Any] = [each[keep].float().requires_grad_() for each in embedded(3, 2)]
        loss = row_losses(Embedding(), leaves, digests(rows))[0]
        return loss.item(), torch.autograd.grad(loss, leaves[0])[0][0]

    twice = gradient([("a", "p"), ("b", "q"), ("c", "p")], [0, 1, 2])
    once = gradient([("a", "p"), ("b", "q")], [0, 1])
    assert twice[0] == pytest.approx(once[0], rel=1e-6)
    torch.testing.assert_close(twice[1], once[1])


def test_digests_survive_fp32_which_gathers_them() -> None:
    halves = torch.tensor([[[2**24 - 1, 1], [2**24 - 1, 2]], [[0, 2**24 - 1], [2**24 - 1, 1]]])
    assert (
        text_numbers(halves.float()).tolist() == text_numbers(halves).tolist() == [[1, 2], [0, 1]]
    )
