"""Silence of C++ code, which writes to file descriptor 2 and not to ``sys.stderr``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stderr_closed() -> Iterator[None]:
    """Send what is written to stderr to nowhere: torch's profiler warns there of processes that were forked."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
