"""Python's garbage collector while a command starts: it would go through the modules again with each that is added."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

USUAL, RARE = gc.get_threshold(), (200_000, 10, 10)
"""Objects between two collections: as Python has it, and while a command imports. Forked ranks inherit that."""


@contextmanager
def spare_modules() -> Iterator[None]:
    """Where collections are rare, leave out of all of them what exists, no tensors yet, and end with the usual ones."""
    if is_rare := gc.get_threshold() == RARE:
        gc.freeze()
    yield
    if is_rare:
        gc.set_threshold(*USUAL)
