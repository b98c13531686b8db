"""The file operations of checkpoints, one method each: tests simulate a crash between any two."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class Files:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Create a folder, unless it exists; its parent must exist."""
        path.mkdir(exist_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a new file; before ``sync`` a crash may lose any part of it.

        Raises FileExistsError if it exists.
        """
        with path.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)

    def sync(self, path: Path) -> None:
        """Wait until the bytes of a file, or the names in a folder, are on disk."""
        windows = os.name == "nt"
        if windows and path.is_dir():  # Windows opens no folder
            return
        # Windows flushes only a file that is open for writing.
        mode = os.O_RDWR if windows else os.O_RDONLY
        handle = os.open(path, mode)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder, atomically."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder and everything in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
