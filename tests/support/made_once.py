"""What takes long to make, made by one of the workers that run tests and used by all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def folder_of_all_workers(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this run of the tests, in which each worker has one of its own."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return ``folder``, which ``make`` fills unless another worker has. It must not be
    written to by tests.

    Others wait meanwhile. What failed half way is not used: the next one tries again.
    """
    complete = folder.with_name(f"{folder.name}.complete")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not complete.exists():
            make(folder)
            complete.touch()
    return folder
