"""Masks by row: as often as asked, unlike each other, and what cannot be by row is named."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from row_mask_cases import RUN, forward_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcore.errors import TaskError
from distcore.model import RowMasks, current_masks
from distcore.model.row_dropout import use_row_masks

ROWS = np.array([4, 9, 2, 7])
WIDTH = 512


@pytest.fixture
def masks() -> Iterator[RowMasks]:
    with use_row_masks(RUN) as made:
        assert made is not None
        yield made


def dropped(p: float = 0.5, rows: np.ndarray = ROWS, tokens: int = 30, calls: int = 1) -> Tensor:
    """Apply dropout to ones several times; return the last result, ``(rows, tokens, WIDTH)``."""
    with forward_of(rows):
        for _ in range(calls):
            kept = F.dropout(torch.ones(len(rows), tokens, WIDTH), p)
    return kept


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_values_are_dropped_as_asked(p: float) -> None:
    kept = dropped(p, np.arange(64))
    deviation = (p * (1 - p) / 2**18) ** 0.5  # of the pool, which all tokens share
    assert float((kept == 0).double().mean()) == pytest.approx(p, abs=5 * deviation)
    assert kept[kept != 0].unique().tolist() == [pytest.approx(1 / (1 - p), rel=1e-3)]


def test_masks_of_tokens_rows_calls_and_steps_are_unlike(masks: RowMasks) -> None:
    first = dropped()
    masks.key = 1
    others = {"step": dropped()}
    masks.key = 0
    others |= {"call": dropped(calls=2), "row": dropped(rows=ROWS + 1)}
    flat = (first == 0).double().flatten(0, 1)
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    # that of independent masks
    assert float(correlation.std()) == pytest.approx(WIDTH**-0.5, rel=0.05)
    for name, other in others.items():
        assert (first == other).double().mean() == pytest.approx(0.5, abs=0.02), name
    assert torch.equal(dropped(), first)


@pytest.mark.usefixtures("masks")
def test_a_row_has_its_mask_beside_any_others_and_at_any_padding() -> None:
    whole = dropped()
    assert torch.equal(dropped(rows=ROWS[[2, 0]], tokens=20), whole[[2, 0], :20])


@pytest.mark.usefixtures("masks")
def test_attention_is_torchs_with_the_mask_of_the_row() -> None:
    query, key, value = (torch.randn(4, 2, 6, 8) for _ in range(3))
    seen = torch.ones(4, 1, 6, 6, dtype=torch.bool)
    seen[1, ..., 4:] = False
    with forward_of(ROWS):
        made = F.scaled_dot_product_attention(query, key, value, seen, dropout_p=0.3)
    with forward_of(ROWS[1:2]):
        cut = (query[1:2], key[1:2, :, :4], value[1:2, :, :4])
        alone = F.scaled_dot_product_attention(*cut, dropout_p=0.3)
    assert (made[1:2] - alone).abs().max() < 1e-6
    plain = F.scaled_dot_product_attention(query, key, value, seen)
    assert (made - plain).abs().max() > 0.1
    with forward_of(ROWS):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, seen), plain)


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_has_the_masks_of_the_first_pass(calls: int, reentrant: bool) -> None:
    # a module that is called twice has two masks
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    gradients = []
    for again in (True, False):
        layer.zero_grad()
        with forward_of(ROWS):
            made = torch.ones(4, 3, 8, requires_grad=True)
            for _ in range(calls):
                made = checkpoint(layer, made, use_reentrant=reentrant) if again else layer(made)
        made.square().sum().backward()
        gradients.append(layer.get_parameter("0.weight").grad)
    assert torch.equal(gradients[0], gradients[1])  # type: ignore[arg-type]


def test_padding_before_the_first_token_changes_no_mask(masks: RowMasks) -> None:
    states, right, left = torch.randn(2, 3, 6, 8), torch.ones(2, 6), torch.ones(2, 6)
    right[1, 4:], left[1, :2] = 0, 0
    made = []
    for seen in (right, left):
        masks.begin_rows(ROWS[:2], torch.device("cpu"), {"attention_mask": seen})
        hidden = F.dropout(torch.ones(2, 6, WIDTH), 0.5)
        keys = seen[:, None, None].expand(2, 1, 6, 6) > 0
        given = states.clone()
        given[1] = states[1].roll(2, 1) if seen is left else states[1]
        made.append(
            (hidden, F.scaled_dot_product_attention(given, given, given, keys, dropout_p=0.5))
        )
    for ends, begins, tokens in zip(*made, (1, 2), strict=True):
        assert torch.equal(ends[0], begins[0])
        one, other = ends[1].movedim(tokens - 1, 0)[:4], begins[1].movedim(tokens - 1, 0)[2:]
        assert (one - other).abs().max() < 1e-6


PARTS = {(3, 1): (1, 2), (3, 2): (0, 2)}
"""The second half of the tokens, the first half of the features."""


def test_a_part_of_a_row_has_its_part_of_the_mask(masks: RowMasks) -> None:
    whole = dropped()
    with forward_of(ROWS):
        masks.set_parts({(4, 1): (1, 2)})
        masks.set_parts(PARTS)
        part = F.dropout(torch.ones(len(ROWS), 15, WIDTH // 2), 0.5)
    assert torch.equal(part, whole[:, 15:, : WIDTH // 2])
    assert torch.equal(dropped(), whole)


def test_heads_of_a_rank_have_their_part_of_the_mask(masks: RowMasks) -> None:
    states = torch.randn(4, 6, 5, 8)
    own = states[:, 4:]
    with forward_of(ROWS):
        whole = F.scaled_dot_product_attention(states, states, states, dropout_p=0.5)
    with forward_of(ROWS):
        masks.set_parts({(4, 1): (2, 3)})
        part = F.scaled_dot_product_attention(own, own, own, dropout_p=0.5)
    assert torch.equal(part, whole[:, 4:])


@pytest.mark.parametrize("widest", [True, False])
def test_a_mask_that_is_too_wide_in_whole_is_by_row_on_no_rank(
    masks: RowMasks, widest: bool
) -> None:
    with forward_of(ROWS):
        masks.set_parts({(2, 1): (0, 2)})
        mask = masks.mask(torch.ones(()), (4, 2**13 + (not widest)), 0.5)
    assert (mask is None) is not widest


def test_recomputation_has_the_part_of_the_first_pass(masks: RowMasks) -> None:
    gradients = []
    for again in (True, False):
        given = torch.ones(4, 15, WIDTH // 2, requires_grad=True)
        with forward_of(ROWS):
            masks.set_parts(PARTS)
            made = checkpoint(F.dropout, given, use_reentrant=False) if again else F.dropout(given)
            # as if an earlier recomputation had ended inside a split layer
            masks.set_parts({(3, 1): (0, 1)})
        made.square().sum().backward()
        gradients.append(given.grad)
    assert torch.equal(gradients[0], gradients[1])  # type: ignore[arg-type]


@pytest.mark.usefixtures("masks")
def test_recomputation_without_the_random_state_is_refused() -> None:
    given = torch.ones(4, 8, requires_grad=True)
    with forward_of(ROWS):
        made = checkpoint(nn.Dropout(0.5), given, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(TaskError, match="preserve_rng_state=True, or set dropout_masks: rank"):
        made.sum().backward()


class DrawsNoise(nn.Module):
    def __init__(self, draw: Callable[[], Tensor | float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, given: Tensor) -> Tensor:
        return given + self.draw()


def own_noise() -> Tensor:
    """Noise of a generator that is the model's, which leaves torch's own alone."""
    return torch.randn(8, generator=torch.Generator().manual_seed(0))


class Attends(nn.Module):
    """Attention without dropout: an operation that can draw, and does not."""

    def forward(self, given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(given, given, given)


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize(
    ("module", "shape", "says"),
    [
        (nn.Dropout(0.5), (4, 3, 8), ""),
        (nn.Dropout(0.5), (8, 8), "dropout of shape (8, 8), whose rows are not known"),
        (Attends(), (4, 2, 6, 8), ""),
    ],
)
def test_dropout_that_is_not_by_row_is_named_once(
    module: nn.Module, shape: tuple[int, ...], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "distcore"):
        for _ in range(2):
            with forward_of(ROWS):
                module(torch.ones(shape))
    assert [record.getMessage() for record in caplog.records] == (
        [f"dropout_masks: results depend on ranks and micro-batches, not by row: {says}"]
        if says
        else []
    )


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize(
    ("draw", "place"),
    [
        (lambda: torch.randn(8), "test_row_dropout.py:"),
        (own_noise, f"test_row_dropout.py:{own_noise.__code__.co_firstlineno + 2}"),
        (lambda: float(np.random.rand()), "the task (Python's or numpy's generator)"),
        (random.random, "the task (Python's or numpy's generator)"),
    ],
)
def test_code_that_draws_for_itself_is_named_once_with_the_way_out(
    draw: Callable[[], Tensor | float], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Sequential(nn.Dropout(0.5), DrawsNoise(draw))
    with caplog.at_level(logging.INFO, "distcore"):
        for _ in range(2):
            with forward_of(ROWS):
                module(torch.ones(4, 8))
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(f"{re.escape(place)}\\d* draws some for each micro-batch", line)
    assert "distcore.row_random in at(epoch)" in line


def test_torch_has_its_functions_back_after_a_run() -> None:
    before = (F.dropout, F.scaled_dot_product_attention)
    with use_row_masks(RUN):
        assert before != (F.dropout, F.scaled_dot_product_attention)
        assert torch.equal(F.dropout(torch.ones(3), training=False), torch.ones(3))
    assert before == (F.dropout, F.scaled_dot_product_attention)
    assert current_masks() is None


BY_RANK: Any = SimpleNamespace(config=SimpleNamespace(dropout_masks="rank"))


def test_a_run_inside_of_another_one_has_its_own_masks_and_gives_the_others_back(
    masks: RowMasks,
) -> None:
    expected = dropped()
    with use_row_masks(RUN) as inner:
        assert current_masks() is inner
        assert inner is not masks
    assert current_masks() is masks
    with use_row_masks(BY_RANK):
        assert current_masks() is None
        torch.manual_seed(0)
        drawn = F.dropout(torch.ones(9))
        torch.manual_seed(0)
        assert torch.equal(drawn, torch.dropout(torch.ones(9), 0.5, True))
    assert current_masks() is masks
    assert torch.equal(dropped(), expected)


def test_runs_that_take_turns_keep_their_masks_whichever_ends_first(masks: RowMasks) -> None:
    masks.key = 1
    expected = dropped()
    inner = use_row_masks(RUN)
    other = inner.__enter__()
    assert other is not None
    other.begin_rows(ROWS, torch.device("cpu"))
    masks.begin_rows(ROWS, torch.device("cpu"))
    assert torch.equal(F.dropout(torch.ones_like(expected)), expected)
    outer = use_row_masks(BY_RANK)
    outer.__enter__()
    inner.__exit__(None, None, None)
    assert current_masks() is None
    outer.__exit__(None, None, None)
    assert current_masks() is masks


def test_between_steps_no_mask_is_by_row(masks: RowMasks) -> None:
    dropped()
    masks.rows = None
    assert masks.mask(torch.ones(4, 3), (4, 3), 0.5) is None
    # more rows than the last step had, as in an evaluation
    with masks.some_rows(torch.tensor([7])):
        assert masks.rows is None
