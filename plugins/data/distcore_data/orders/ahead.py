"""An order of rows that says which ones come later, so that what they lie
in is fetched meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import numpy as np

from distcore import Column, DataError
from distcore_data.cache import byte_setting
from distcore_data.fetching import REMOTE, present
from distcore_data.orders import RowOrder
from distcore_data.room import BYTES, LIMIT

LOOKS = 8
"""Times that an order looks ahead while it goes on by as many positions as it looks at."""


@dataclass(frozen=True, eq=False)
class FetchedAhead:
    """The order of ``rows``; implements ``RowOrder``."""

    order: RowOrder
    """The order."""
    fetch: Callable[[np.ndarray], None]
    """Called with upcoming rows, in order, int64 ``(n,)``."""
    positions: int
    """Positions that it looks ahead."""
    told: dict[int, int] = field(default_factory=dict)
    """The position from which it looked last, by epoch."""

    @property
    def content(self) -> str:
        """Digest of the order."""
        return self.order.content

    def __call__(self, seed: int, epoch: int) -> EpochAhead:
        """Return the order of ``epoch``, counted from 0."""
        return EpochAhead(self, self.order(seed, epoch), epoch)


@dataclass(frozen=True, eq=False, slots=True)
class EpochAhead:
    """One epoch; implements ``distcore.Column``."""

    ahead: FetchedAhead
    """The order of all."""
    rows: Column
    """The order of this epoch."""
    epoch: int
    """Its number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows at ``positions``, both int64, shape ``(n,)``."""
        if len(positions):
            self._look(int(positions[-1]) + 1)
        return self.rows[positions]

    def _look(self, first: int) -> None:
        """Tell the rows from a position on, evenly spread, unless it is near to where
        that was done last.
        """
        wide, told = self.ahead.positions, self.ahead.told
        if first < len(self) and not 0 <= first - told.get(self.epoch, -wide) < wide // LOOKS:
            told[self.epoch] = first
            end = min(first + wide, len(self))
            self.ahead.fetch(
                self.rows[np.unique(np.linspace(first, end - 1, 1024).astype(np.int64))]
            )


def fetch_ahead(files: Sequence[Path]) -> None:
    """Download in the background, up to half of the cache; do nothing while a download runs."""
    global _AHEAD  # one at a time in a process
    if _AHEAD and _AHEAD.is_alive():
        return
    sizes = np.cumsum([REMOTE[file].size if file in REMOTE else 0 for file in files])
    some = [
        file
        for file, size in zip(files, sizes, strict=True)
        if size <= byte_setting(LIMIT, BYTES) // 2
    ]
    missing = [file for file in some if file in REMOTE and not file.is_file()]

    def fetch() -> None:
        with suppress(DataError):  # who reads the file meets it, too
            deque(present(missing), maxlen=0)

    if missing:
        _AHEAD = Thread(target=fetch, name="distcore-fetch", daemon=True)
        _AHEAD.start()


_AHEAD: Thread | None = None
