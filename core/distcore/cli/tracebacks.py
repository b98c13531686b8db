"""Write tracebacks to a file: the screen gets one line, which names the file."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path


def write_traceback(error: BaseException, folder: Path | None = None) -> Path:
    """Write the traceback of ``error`` to ``folder``, by default a new temporary folder, and return the file."""
    folder = folder or Path(tempfile.mkdtemp(prefix="distcore-"))
    path = folder / "traceback.txt"
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return path
