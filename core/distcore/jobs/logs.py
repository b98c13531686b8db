"""The logger ``distcore``: one line per message on stderr, with separate levels for rank 0
and the other ranks.

Messages of rank 0 to the user have no prefix; other lines begin with level and rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distcore.config import RunConfig


def set_up_logging(config: RunConfig, rank: int) -> None:
    """Set level and format of this process's logger from the config; another call replaces both."""
    log = logging.getLogger("distcore")
    log.setLevel((config.log_level if rank == 0 else config.log_level_replica).upper())
    log.propagate = False
    handler = _Screen()
    handler.setFormatter(logging.Formatter(f"%(levelname).1s rank {rank}: %(message)s"))
    handler.is_plain = rank == 0
    log.handlers = [handler]


@contextmanager
def at_level(level: int, name: str = "distcore") -> Iterator[None]:
    """Have the logger ``name`` pass messages from ``level`` on alone, inside the ``with`` block."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


class _Screen(logging.Handler):
    """Writes to the ``sys.stderr`` of the moment: a live progress line replaces it, and so
    stays below the messages.
    """

    is_plain = False
    """True if messages of level INFO have no prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record as one line."""
        told = self.is_plain and record.levelno == logging.INFO
        print(record.getMessage() if told else self.format(record), file=sys.stderr)
