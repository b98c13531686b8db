"""The rank that the others wait for, by where each of them is."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import psutil

from distcore_workbench.watchdog.situation import Collective, RankState

SHOWN = 8
"""Ranks that a line lists."""
ProcessOf = Callable[[int], str]
"""Returns machine and number of a rank's process, with a space between; empty if
they are not known.
"""


class Verdict(NamedTuple):
    """Who is missing."""

    line: str = ""
    """What the user reads; empty if no rank is missing."""
    ranks: tuple[int, ...] = ()
    """The ranks whose end lets the others go on."""
    silent: tuple[int, ...] = ()
    """Those of them that do not answer, and so cannot end by themselves."""


def verdict(
    ranks: Mapping[int, RankState], silent: Collection[int], process_of: ProcessOf
) -> Verdict:
    """Return which rank is missing, ``silent`` being those that did not answer.

    A rank is missing if it has not entered the collective in which others wait, or entered another
    one. Without a record of collectives it is the one that stands elsewhere.
    """
    if silent:
        gone = ", ".join(
            f"rank {rank} ({_state_of(process_of(rank))})" for rank in sorted(silent)[:SHOWN]
        )
        gone_ranks = tuple(sorted(silent))
        return Verdict(
            f"{gone} does not answer; {_waiting(ranks.values())}", gone_ranks, gone_ranks
        )
    groups = sorted({group for one in ranks.values() for group in one.groups})
    for group in groups:
        if different := _different(ranks, group, process_of):
            return different
    late = {group: _late(ranks, group) for group in groups}
    # Who waits in another group is late because of a third one, who is not waiting.
    free = [group for group in groups if any(not ranks[rank].waits_in for rank in late[group])]
    for group in [*free, *(group for group in groups if late[group])]:
        others = (one for rank, one in ranks.items() if rank not in late[group])
        line = f"{_doing(ranks, late[group], process_of, 'missing')}; {_waiting(others)}"
        return Verdict(line, tuple(late[group]))
    if all(one.waits_in for one in ranks.values()):
        line = (
            f"all ranks wait in {ranks[min(ranks)].waits_in}: the link between them does not answer"
        )
        return Verdict(line, (max(ranks),))  # any of them: its end is what the others notice
    return Verdict() if groups else _elsewhere(ranks, process_of)


def _members(ranks: Mapping[int, RankState], group: str) -> dict[int, Sequence[Collective]]:
    """Return the last collectives of ``group`` by rank; none if no rank waits in it."""
    members = {rank: one.groups[group] for rank, one in ranks.items() if group in one.groups}
    return members if any(not last[-1].is_over for last in members.values()) else {}


def _late(ranks: Mapping[int, RankState], group: str) -> list[int]:
    """Return the ranks that have not begun the newest collective of ``group``,
    in which others wait.
    """
    numbers = {rank: last[-1].number for rank, last in _members(ranks, group).items()}
    return [rank for rank, number in numbers.items() if number < max(numbers.values())]


def _different(ranks: Mapping[int, RankState], group: str, process_of: ProcessOf) -> Verdict | None:
    """Return the ranks whose collective was another one than that of the others
    with the same number.
    """
    members = _members(ranks, group)
    oldest = min((last[-1].number for last in members.values()), default=0)
    calls: defaultdict[str, list[int]] = defaultdict(list)
    for rank, last in members.items():
        for one in last:
            if one.number == oldest:
                calls[one.call].append(rank)
    if len(calls) < 2:
        return None
    odd, others = _odd(calls.values())
    call = next(call for call, those in calls.items() if those is odd)
    doing = _doing(ranks, odd, process_of, f"in another collective, {call}, number {oldest},")
    return Verdict(f"{doing}; {_waiting(ranks[rank] for rank in others)}", tuple(odd))


def _elsewhere(ranks: Mapping[int, RankState], process_of: ProcessOf) -> Verdict:
    """Return the ranks that stand elsewhere than the others."""
    places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, one in ranks.items():
        places[one.inside, one.at].append(rank)
    if len(places) == 1:
        return Verdict()
    odd, others = _odd(places.values())
    line = (
        f"{_doing(ranks, odd, process_of, 'elsewhere')}; {_waiting(ranks[rank] for rank in others)}"
    )
    return Verdict(line, tuple(odd))


def _odd(sets: Collection[list[int]]) -> tuple[list[int], list[int]]:
    """Return the smallest set of ranks, of equal ones that of higher ranks, and all other ranks."""
    odd = min(sets, key=lambda ranks: (len(ranks), -min(ranks)))
    return odd, sorted(rank for ranks in sets if ranks is not odd for rank in ranks)


def _doing(
    ranks: Mapping[int, RankState], named: list[int], process_of: ProcessOf, what: str
) -> str:
    one = ranks[named[0]]
    machine, _, number = process_of(one.rank).partition(" ")
    is_or_are = "is" if len(named) == 1 else "are"
    return f"{_names(named)} {is_or_are} {what} {one} (process {number} on {machine})"


def _waiting(ranks: Iterable[RankState]) -> str:
    """Return where these ranks are."""
    places: defaultdict[tuple[bool, str], list[int]] = defaultdict(list)
    for one in ranks:
        inside = f", in {one.inside}" if one.inside else ""
        places[bool(one.waits_in), f"{one.waits_in}{inside}" if one.waits_in else str(one)].append(
            one.rank
        )
    verbs = {True: ("waits in", "wait in"), False: ("is", "are")}
    said = (
        (there, verbs[waits][len(there) > 1], place) for (waits, place), there in places.items()
    )
    return "; ".join(f"{_names(there)} {verb} {place}" for there, verb, place in said)


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _state_of(process: str) -> str:
    """Return machine and number of a process that does not answer, and, on
    this machine, its state.
    """
    machine, _, number = process.partition(" ")
    if machine != socket.gethostname():
        return f"process {number} on {machine}" if process else "never heard of"
    try:
        return f"process {number} on {machine}: {psutil.Process(int(number)).status()}"
    except psutil.NoSuchProcess:
        return f"process {number} on {machine}: has ended"
