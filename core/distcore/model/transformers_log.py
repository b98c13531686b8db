"""Silence of transformers while it loads or builds a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings, which the user cannot act on."""
    from transformers.utils import logging

    library: Any = logging
    level = library.get_verbosity()
    bar = library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bar:
            library.enable_progress_bar()
