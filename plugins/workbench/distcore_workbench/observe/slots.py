"""Values of each rank in the sum that sends the loss: every rank adds to places of its own."""

from __future__ import annotations

from distcore import Run

SLOTS = 64
"""Ranks that send in one log line. Of more, each sends in every second line, every third and so on."""
NAME = "peak_memory_of_slot"
"""Beginning of a name; no other value of a log line begins so."""


class Slots:
    """The values that ranks have sent so far."""

    def __init__(self, ranks: int) -> None:
        """Make places for so many ranks."""
        self._turns = -(-ranks // SLOTS)
        self._turn = 0
        self.names = tuple(f"{NAME}_{slot}" for slot in range(min(ranks, SLOTS)))
        """Names of the sums."""
        self.peaks: dict[int, float] = {}
        """The peak memory of each rank in bytes, as it was sent last."""

    def send(self, run: Run, peak: float) -> None:
        """Add this rank's values if it is its turn."""
        turn, slot = divmod(run.world.rank, SLOTS)
        if turn == self._turn and slot < len(self.names):
            run.tally.add(self.names[slot], peak)  # not by run.log, which is for the rank that leads a data shard

    def read(self, record: dict[str, float]) -> None:
        """Take the values of all ranks out of a log line."""
        for slot, name in enumerate(self.names):
            if name in record:
                self.peaks[self._turn * SLOTS + slot] = record.pop(name)
        self._turn = (self._turn + 1) % self._turns
