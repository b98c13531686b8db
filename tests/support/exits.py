"""How a test's program ends on an error: as the command line does, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distcore.errors import INTERRUPTED, DistcoreError, StoppedError


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the program on an error as the command line does, without a traceback.

    A DistcoreError prints ``error: …`` and exits with its status, Ctrl-C prints ``interrupted``
    and exits with 130.
    """
    try:
        yield
    except DistcoreError as error:
        print(error if isinstance(error, StoppedError) else f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
