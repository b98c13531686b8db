"""The verdict names the rank that the others wait for, by what each has told."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import pytest

from distcore_workbench.watchdog.situation import Collective, RankState
from distcore_workbench.watchdog.verdict import verdict

SUM = Collective(number=48, call="all_reduce of float [9]", is_over=False)
OVER = Collective(number=47, call="all_reduce of float [9]", is_over=True)


def at(rank: int, last: Collective | None = None, **more: Any) -> RankState:
    groups = {"gloo 0": [last]} if last else {}
    defaults: dict[str, Any] = {"inside": "hook backward()", "at": "backward() (ddp.py:9)"}
    return RankState(rank=rank, step=7, seconds=4.0, groups=groups, **(defaults | more))


def named(*ranks: RankState, silent: tuple[int, ...] = ()) -> str:
    return verdict(
        {one.rank: one for one in ranks}, silent, lambda rank: f"node{rank} 10{rank}"
    ).line


def test_a_rank_that_has_not_begun_a_collective_is_missing() -> None:
    sleeps = at(1, OVER, inside="hook on_log()", at="mine() (mine.py:3)")
    assert (
        named(at(0, SUM), sleeps, at(2, SUM))
        == "rank 1 is missing for 4 s in hook on_log(), in step 7, at mine() (mine.py:3) (process"
        " 101 on node1); ranks 0, 2 wait in all_reduce of float [9], number 48, in hook"
        " backward()"
    )


def test_the_late_rank_that_waits_for_nobody_is_missing() -> None:
    """Rank 0 waits for rank 1, and is late for rank 2."""
    pair = Collective(number=5, call="broadcast of float [2]", is_over=False)
    done = Collective(number=4, call="broadcast of float [2]", is_over=True)
    ranks = [
        RankState(rank=0, step=7, seconds=4.0, at="a", groups={"gloo 0": [OVER], "gloo 1": [pair]}),
        RankState(rank=1, step=7, seconds=4.0, at="b", groups={"gloo 1": [done]}),
        RankState(rank=2, step=7, seconds=4.0, at="c", groups={"gloo 0": [SUM]}),
    ]
    assert named(*ranks).startswith(
        "rank 1 is missing for 4 s, in step 7, at b (process 101 on node1); "
    )


@pytest.mark.parametrize("call", ["all_reduce of float [7]", "all_reduce of double [9]", "barrier"])
def test_a_rank_in_another_collective_is_named_with_that_of_the_others(call: str) -> None:
    line = named(at(0, SUM), at(1, Collective(number=48, call=call, is_over=False)), at(2, SUM))
    assert line.startswith(
        f"rank 1 is in another collective, {call}, number 48, for 4 s in hook backward(), in step 7"
    )
    assert line.endswith(
        "; ranks 0, 2 wait in all_reduce of float [9], number 48, in hook backward()"
    )


def test_a_rank_that_left_out_a_collective_is_named_though_another_is_ahead() -> None:
    """As of a broadcast on three ranks: rank 2 has its part, rank 0 has not sent that of rank 1."""
    sent = Collective(number=48, call="broadcast of float [5]", is_over=True)
    ahead = RankState(
        rank=2, step=7, seconds=4.0, groups={"gloo 0": [sent, replace(SUM, number=49)]}
    )
    assert named(at(0, replace(sent, is_over=False)), at(1, SUM), ahead).startswith(
        "rank 1 is in another collective, all_reduce of float [9], number 48, for 4 s"
    )


def test_a_rank_that_does_not_answer_is_named_with_its_process() -> None:
    assert named(at(0, SUM), silent=(1,)).startswith(
        "rank 1 (process 101 on node1) does not answer; rank 0 waits in"
    )
    here = f"{socket.gethostname()} {os.getpid()}"
    assert (
        f"(process {os.getpid()} on {socket.gethostname()}: running)"
        in verdict({0: at(0, SUM)}, [1], lambda _: here).line
    )
    assert (
        "rank 1 (never heard of) does not answer"
        in verdict({0: at(0, SUM)}, [1], lambda _: "").line
    )


def test_a_dead_link_is_named_where_all_wait_in_the_same() -> None:
    assert (
        named(at(0, SUM), at(1, SUM))
        == "all ranks wait in all_reduce of float [9], number 48: the link between them does not"
        " answer"
    )


def test_ranks_that_only_take_long_are_not_named() -> None:
    assert named(at(0, OVER), at(1, OVER)) == ""
    assert named(at(0), at(1)) == ""


def test_without_a_record_of_collectives_the_rank_that_is_elsewhere_is_named() -> None:
    line = named(at(0), at(1, at="mine() (mine.py:3)"), at(2))
    assert line.startswith(
        "rank 1 is elsewhere for 4 s in hook backward(), in step 7, at mine() (mine.py:3) (process"
    )


def test_a_place_comes_back_from_its_text() -> None:
    place = at(1, SUM, is_progressing=True)
    assert RankState.loads(place.dumps().encode()) == place
