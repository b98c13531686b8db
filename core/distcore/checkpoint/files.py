"""What a checkpoint asks of the file system, one method an operation, so that a test can stop between any two."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class Files:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a new file; nothing of it is sure to survive a crash before ``sync``."""
        with path.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes, or a folder's names, are on the disk."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
