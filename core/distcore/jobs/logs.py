"""The logger ``distcore``: one short line a message on stderr, a level of its own for replicas."""

from __future__ import annotations

import logging
import sys

from distcore.config import RunConfig


def set_up_logging(config: RunConfig, rank: int) -> None:
    """Give this process's logger its level and form; calling it again changes them."""
    log = logging.getLogger("distcore")
    level = config.log_level if rank == 0 else config.log_level_replica
    log.setLevel(level.upper())
    log.propagate = False
    handler = _Screen()
    handler.setFormatter(logging.Formatter(f"%(levelname).1s rank {rank}: %(message)s"))
    log.handlers = [handler]


class _Screen(logging.Handler):
    """Looks stderr up for each message, so that a live progress line can catch it and stay below."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
