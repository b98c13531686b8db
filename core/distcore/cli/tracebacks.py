"""Tracebacks go to a file; the screen gets one line that names it."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path


def write_traceback(error: BaseException, folder: Path | None = None) -> Path:
    """Write the traceback of ``error`` and return the file; in a new temporary folder unless told where."""
    folder = folder or Path(tempfile.mkdtemp(prefix="distcore-"))
    path = folder / "traceback.txt"
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return path
