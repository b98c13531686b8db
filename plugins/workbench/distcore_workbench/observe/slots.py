"""Values of each rank in the sum that sends the loss: every rank adds to places of its own."""

from __future__ import annotations

from collections.abc import Mapping

from distcore import Run

SLOTS = 16
"""Ranks that send in one log line. Of more, each sends in every second line, every
third and so on.
"""
SENT = ("peak_memory", "data", "compute", "spread", "data_of_all", "compute_of_all")
"""Values of a rank: its peak memory in bytes, and the seconds of the own part of its steps
since it sent last.

``data`` and ``compute`` are the median of a step, ``spread`` that of the deviations of their sum,
the other two the sum of all steps.
"""


class Slots:
    """The values that ranks have sent so far."""

    def __init__(self, ranks: int) -> None:
        """Make places for so many ranks."""
        self.turns = -(-ranks // SLOTS)
        """Log lines until every rank has sent."""
        self._turn = 0
        self._places = [
            {what: f"{what}_of_slot_{slot}" for what in SENT} for slot in range(min(ranks, SLOTS))
        ]
        self.names = tuple(name for place in self._places for name in place.values())
        """Names of the sums."""
        self.values: dict[int, dict[str, float]] = {}
        """What each rank sent last."""
        self.news: dict[int, dict[str, float]] = {}
        """What ranks sent with the last log line."""

    def is_turn_of(self, rank: int) -> bool:
        """Return True if this rank sends with the next log line."""
        turn, slot = divmod(rank, SLOTS)
        return turn == self._turn and slot < len(self._places)

    def send(self, run: Run, values: Mapping[str, float]) -> None:
        """Add the values of this rank, whose turn it is."""
        for what, name in self._places[run.world.rank % SLOTS].items():
            # not by run.log, which is for the rank that leads a data shard
            run.tally.add(name, values[what])

    def read(self, record: dict[str, float]) -> None:
        """Take the values of all ranks out of a log line."""
        first = self._turn * SLOTS
        self.news = {
            first + slot: {what: record.pop(name) for what, name in place.items()}
            for slot, place in enumerate(self._places)
            if place[SENT[0]] in record
        }
        self.values |= self.news
        self._turn = (self._turn + 1) % self.turns
