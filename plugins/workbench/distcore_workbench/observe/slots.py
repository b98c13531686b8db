"""Values of each rank in the sum that sends the loss: every rank adds to names of its own."""

from __future__ import annotations

from collections.abc import Mapping

from distcore import Run

SLOTS = 16
"""Ranks that send in one log line. Of more, each sends in every second line, every third, …"""
SENT = ("peak_memory", "data", "compute", "spread", "data_of_all", "compute_of_all")
"""Values of a rank: its peak memory in bytes, and seconds of its steps since it sent last.

The seconds are of the rank's own work, without its waits for other ranks.
``data`` and ``compute`` are the median of a step, ``spread`` that of the deviations of their sum,
the other two the sum of all steps.
"""


class Slots:
    """The values that ranks have sent so far."""

    def __init__(self, ranks: int) -> None:
        """Make slots for this number of ranks."""
        self.turns = -(-ranks // SLOTS)
        """Log lines until every rank has sent."""
        self._turn = 0
        self._slots: list[dict[str, str]] = []
        for slot in range(min(ranks, SLOTS)):
            self._slots.append({value: f"{value}_of_slot_{slot}" for value in SENT})
        self.names = tuple(name for slot_names in self._slots for name in slot_names.values())
        """Names of the sums."""
        self.values: dict[int, dict[str, float]] = {}
        """What each rank sent last."""
        self.news: dict[int, dict[str, float]] = {}
        """What ranks sent with the last log line."""

    def is_turn_of(self, rank: int) -> bool:
        """Return True if this rank sends with the next log line."""
        turn, slot = divmod(rank, SLOTS)
        return turn == self._turn and slot < len(self._slots)

    def send(self, run: Run, values: Mapping[str, float]) -> None:
        """Add the values of this rank, whose turn it is."""
        for value, name in self._slots[run.world.rank % SLOTS].items():
            # not by run.log, which is for the rank that leads a data shard
            run.tally.add(name, values[value])

    def read(self, record: dict[str, float]) -> None:
        """Take the values of all ranks out of a log line."""
        first_rank = self._turn * SLOTS
        self.news = {}
        for slot, slot_names in enumerate(self._slots):
            # The last turn has fewer ranks than there are slots.
            if slot_names[SENT[0]] in record:
                values = {value: record.pop(name) for value, name in slot_names.items()}
                self.news[first_rank + slot] = values
        self.values |= self.news
        self._turn = (self._turn + 1) % self.turns
