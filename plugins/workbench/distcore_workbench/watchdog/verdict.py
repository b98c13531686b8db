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
"""Returns machine and number of a rank's process, with a space between; empty if not known."""


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
    one. Without a record of collectives it is the one whose code is elsewhere.
    """
    if silent:
        return _unanswered(ranks, silent, process_of)
    groups = sorted({group for state in ranks.values() for group in state.groups})
    for group in groups:
        if different := _different(ranks, group, process_of):
            return different
    missing = _missing(ranks, groups)
    if missing:
        others = (state for rank, state in ranks.items() if rank not in missing)
        line = f"{_doing(ranks, missing, process_of, 'missing')}; {_waiting(others)}"
        return Verdict(line, tuple(missing))
    if all(state.waits_in for state in ranks.values()):
        collective = ranks[min(ranks)].waits_in
        line = f"all ranks wait in {collective}: the link between them does not answer"
        return Verdict(line, (max(ranks),))  # any of them: its end is what the others notice
    return Verdict() if groups else _elsewhere(ranks, process_of)


def _unanswered(
    ranks: Mapping[int, RankState], silent: Collection[int], process_of: ProcessOf
) -> Verdict:
    """Return the verdict on ranks that did not answer: they are the missing ones."""
    silent_ranks = tuple(sorted(silent))
    states = [f"rank {rank} ({_state_of(process_of(rank))})" for rank in silent_ranks[:SHOWN]]
    line = f"{', '.join(states)} does not answer; {_waiting(ranks.values())}"
    return Verdict(line, silent_ranks, silent_ranks)


def _missing(ranks: Mapping[int, RankState], groups: Sequence[str]) -> list[int]:
    """Return the ranks that are late in one of ``groups``; empty if none is late in any."""
    late_by_group = {group: _late(ranks, group) for group in groups}
    # Who waits in another group is late because of a third one, who is not waiting.
    for late in late_by_group.values():
        if any(not ranks[rank].waits_in for rank in late):
            return late
    for late in late_by_group.values():
        if late:
            return late
    return []


def _members(ranks: Mapping[int, RankState], group: str) -> dict[int, Sequence[Collective]]:
    """Return the last collectives of ``group`` by rank; none if no rank waits in it."""
    members = {}
    for rank, state in ranks.items():
        if group in state.groups:
            members[rank] = state.groups[group]
    is_waited_in = any(not last[-1].is_over for last in members.values())
    return members if is_waited_in else {}


def _late(ranks: Mapping[int, RankState], group: str) -> list[int]:
    """Return the ranks that have not begun the newest collective of ``group``.

    Empty if no rank waits in the group.
    """
    members = _members(ranks, group)
    numbers = {rank: last[-1].number for rank, last in members.items()}
    newest = max(numbers.values(), default=0)
    return [rank for rank, number in numbers.items() if number < newest]


def _different(ranks: Mapping[int, RankState], group: str, process_of: ProcessOf) -> Verdict | None:
    """Return the verdict on ranks that called another collective than the others.

    Compared is the newest collective that all ranks of ``group`` have begun, by its number.
    ``None`` if they agree.
    """
    members = _members(ranks, group)
    newest_numbers = [last[-1].number for last in members.values()]
    number = min(newest_numbers, default=0)
    ranks_by_call: defaultdict[str, list[int]] = defaultdict(list)
    for rank, last in members.items():
        for collective in last:
            if collective.number == number:
                ranks_by_call[collective.call].append(rank)
    if len(ranks_by_call) < 2:
        return None
    odd, others = _odd(ranks_by_call.values())
    call = next(call for call, callers in ranks_by_call.items() if callers is odd)
    doing = _doing(ranks, odd, process_of, f"in another collective, {call}, number {number},")
    return Verdict(f"{doing}; {_waiting(ranks[rank] for rank in others)}", tuple(odd))


def _elsewhere(ranks: Mapping[int, RankState], process_of: ProcessOf) -> Verdict:
    """Return the verdict on the ranks whose code is elsewhere than that of the others."""
    ranks_by_line: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, state in ranks.items():
        ranks_by_line[state.inside, state.at].append(rank)
    if len(ranks_by_line) == 1:
        return Verdict()
    odd, others = _odd(ranks_by_line.values())
    doing = _doing(ranks, odd, process_of, "elsewhere")
    return Verdict(f"{doing}; {_waiting(ranks[rank] for rank in others)}", tuple(odd))


def _odd(sets: Collection[list[int]]) -> tuple[list[int], list[int]]:
    """Return the smallest set of ranks, and all other ranks in order.

    Of equally small sets it is the one of higher ranks.
    """
    odd = min(sets, key=lambda ranks: (len(ranks), -min(ranks)))
    others = [rank for ranks in sets if ranks is not odd for rank in ranks]
    return odd, sorted(others)


def _doing(
    ranks: Mapping[int, RankState], named: list[int], process_of: ProcessOf, verb: str
) -> str:
    """Return that the ``named`` ranks are ``verb``, such as 'missing', and where the first is."""
    first = ranks[named[0]]
    machine, _, number = process_of(first.rank).partition(" ")
    is_or_are = "is" if len(named) == 1 else "are"
    return f"{_names(named)} {is_or_are} {verb} {first} (process {number} on {machine})"


def _waiting(ranks: Iterable[RankState]) -> str:
    """Return where these ranks are, those at one line of code together."""
    ranks_by_line: defaultdict[tuple[bool, str], list[int]] = defaultdict(list)
    for state in ranks:
        inside = f", in {state.inside}" if state.inside else ""
        line = f"{state.waits_in}{inside}" if state.waits_in else str(state)
        ranks_by_line[bool(state.waits_in), line].append(state.rank)
    verbs = {True: ("waits in", "wait in"), False: ("is", "are")}
    sentences = []
    for (waits, line), ranks_there in ranks_by_line.items():
        singular, plural = verbs[waits]
        verb = singular if len(ranks_there) == 1 else plural
        sentences.append(f"{_names(ranks_there)} {verb} {line}")
    return "; ".join(sentences)


def _names(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1, …``, with at most ``SHOWN`` numbers."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    if len(ranks) > SHOWN:
        shown += ", …"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _state_of(process: str) -> str:
    """Return machine and number of a process that does not answer, and its state.

    The state is known only on this machine.
    """
    machine, _, number = process.partition(" ")
    if machine != socket.gethostname():
        return f"process {number} on {machine}" if process else "never heard of"
    try:
        return f"process {number} on {machine}: {psutil.Process(int(number)).status()}"
    except psutil.NoSuchProcess:
        return f"process {number} on {machine}: has ended"
