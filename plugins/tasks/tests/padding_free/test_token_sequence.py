"""A micro-batch as one sequence: which tokens it has, in which order, and which
of them attend together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distcore_tasks.padding_free.token_sequence import crossing_of, sequence_of


def mask_of(*lengths: int) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def test_a_sequence_has_each_token_once_rows_from_the_shortest_on() -> None:
    rows = sequence_of(mask_of(3, 1, 2))
    assert rows.places.tolist() == [3, 6, 7, 0, 1, 2]
    assert rows.offsets.tolist() == [0, 0, 1, 0, 1, 2]
    tokens = torch.tensor([[7, 8, 9], [4, 0, 0], [5, 6, 0]])
    assert rows.taken(tokens).tolist() == [[4, 5, 6, 7, 8, 9]]
    hidden = rows.taken(tokens)[..., None].float()
    assert rows.padded(hidden)[..., 0].tolist() == tokens.tolist()
    assert rows.in_order(hidden).flatten().tolist() == [7, 8, 9, 4, 5, 6]


def test_repeated_tokens_make_a_round_number_and_are_in_no_result() -> None:
    rows = sequence_of(mask_of(3, 1, 2), multiple=4)
    assert rows.places.tolist() == [3, 6, 7, 0, 1, 2, 3, 3]
    assert (rows.real, sum(group.stop - group.start for group in rows.groups)) == (6, 6)
    tokens = torch.tensor([[7, 8, 9], [4, 0, 0], [5, 6, 0]])
    hidden = rows.taken(tokens)[..., None].float()
    assert rows.padded(hidden)[..., 0].tolist() == tokens.tolist()
    assert rows.in_order(hidden).flatten().tolist() == [7, 8, 9, 4, 5, 6]
    assert sequence_of(mask_of(1, 2), multiple=4).in_order(hidden).flatten().tolist() == [4, 5, 6]
    assert len(sequence_of(mask_of(3, 1), 3, multiple=4).places) == 4


def test_rows_that_come_in_order_are_not_sorted_again() -> None:
    assert sequence_of(mask_of(1, 2, 2, 3)).order is None


def test_rows_of_one_length_are_one_group_without_padding() -> None:
    [group] = sequence_of(mask_of(4, 4, 4)).groups
    assert (group.start, group.stop, group.rows, group.longest, group.places) == (0, 12, 3, 4, None)


def test_groups_are_those_that_cost_least() -> None:
    groups = sequence_of(mask_of(*[4] * 50, *[5] * 2, *[100] * 2)).groups
    assert [(group.rows, group.longest) for group in groups] == [(52, 5), (2, 100)]
    assert [group.places is None for group in groups] == [False, True]
    assert [(group.start, group.stop) for group in groups] == [(0, 210), (210, 410)]


def test_a_group_knows_where_its_tokens_and_its_padding_are() -> None:
    [group] = sequence_of(mask_of(1, 3)).groups
    assert group.places is not None
    assert group.real is not None
    assert group.mask is not None
    assert group.places.tolist()[:1] + group.places.tolist()[3:] == [0, 1, 2, 3]
    assert group.real.tolist() == [0, 3, 4, 5]
    assert group.mask[:, 0, 0].tolist() == [[True, False, False], [True, True, True]]


def test_a_row_without_a_token_is_in_no_group_and_comes_back_as_zeros() -> None:
    rows = sequence_of(mask_of(2, 0, 1))
    assert sum(group.rows for group in rows.groups) == 2
    assert rows.padded(torch.ones(1, 3, 1))[..., 0].tolist() == [[1, 1], [0, 0], [1, 0]]


def test_rows_attend_at_once_unless_one_is_too_long() -> None:
    assert [len(sequence_of(mask_of(3, 1), longest).groups) for longest in (3, 2, 0)] == [0, 1, 1]
    assert sequence_of(mask_of(3, 1), 3).bounds is not None


def test_padding_may_stand_on_the_left() -> None:
    rows = sequence_of(mask_of(3, 1).flip(1))
    assert rows.places.tolist() == [5, 0, 1, 2]
    assert rows.offsets.tolist() == [0, 0, 1, 2]


def test_first_tokens_come_back_row_by_row() -> None:
    rows = sequence_of(mask_of(3, 0, 1, 2))
    hidden = torch.arange(6.0)[None, :, None]
    assert rows.firsts(hidden).flatten().tolist() == [0, 1, 3]
    assert rows.by_row(rows.firsts(hidden)).tolist() == [[[3]], [[0]], [[0]], [[1]]]


def test_a_decoder_s_tokens_are_at_the_places_of_the_rows_that_they_read() -> None:
    targets = sequence_of(mask_of(2, 0, 3, 1))
    crossing = crossing_of(targets, sequence_of(mask_of(100, 100, 4, 4)))
    assert crossing.longest == (3, 2)  # rows 2 and 3 read 4 tokens, rows 0 and 1 read 100
    rows = targets.rows[crossing.places].tolist()
    assert rows[:6] + rows[6:8] == [2, 2, 2, 3, 3, 3, 0, 0]
    assert targets.offsets[crossing.places].tolist()[:8] == [0, 1, 2, 0, 0, 0, 0, 1]
    assert crossing.places[crossing.back].tolist() == [0, 1, 2, 3, 4, 5]
