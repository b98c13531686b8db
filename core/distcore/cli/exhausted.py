"""An error for want of memory ends with what the plan would have said."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distcore.errors import RankError

if TYPE_CHECKING:
    from distcore.config import RunConfig


MESSAGE = re.compile(
    r"DefaultCPUAllocator: .*(can't|not enough) .*memory|OutOfMemoryError|\bout of memory\b|MemoryError"
)
"""How torch's allocators and Python say that there is none left."""


@contextmanager
def explained(file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]) -> Iterator[None]:
    """Raise RankError, one line, if what runs inside dies for want of memory: what it needs, and what to try next."""
    try:
        yield
        return
    except RankError as error:
        if not MESSAGE.search(str(error)):
            raise
        line = str(error)
    except (RuntimeError, MemoryError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        if not MESSAGE.search(cause):
            raise
        from distcore.cli.tracebacks import write_traceback

        line = f"{cause} (traceback: {write_traceback(error)})"
    gc.collect()  # with the error its frames are gone, and what they held
    raise RankError(f"{line}; {_advice(file, changes, read_config)}")


def _advice(file: str | None, changes: Mapping[str, Any], read_config: Callable[[], RunConfig]) -> str:
    from distcore.engine.resolve import resolve
    from distcore.planning.exhausted import advice
    from distcore.planning.request import Request

    config = resolve(read_config())
    return advice(Request(config=file, changes=changes, strategies="", ranks=[int(config.nproc)]), config)
