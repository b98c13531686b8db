"""The file of predictions: whole or not there, and continued where a run that was ended left it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import BinaryIO

from distcore.errors import ConfigError
from distcore.files import lock, strict_json, write_atomically

BLOCK = 2**20
"""Bytes that are read at a time."""


class PredictionFile:
    """The lines of ``out``. They are collected in ``out.part`` until the last one is written.

    ``out.part.json`` has the facts behind the lines. Only a file with the same facts is continued.
    """

    def __init__(self, out: Path, facts: dict[str, object]) -> None:
        """``facts`` are the inputs of every line, JSON values by name."""
        self.out = out
        self.facts = facts
        self.part = out.with_name(f"{out.name}.part")
        self._about = out.with_name(f"{out.name}.part.json")
        self._lock: BinaryIO | None = None

    def check(self) -> None:
        """Raise ConfigError if ``out`` is there or cannot be made, or if its
        part has other predictions.
        """
        if self.out.suffix != ".jsonl":
            raise ConfigError(f"--out {self.out}: expected a file that ends in .jsonl")
        if self.out.exists():
            raise ConfigError(
                f"--out {self.out}: is already there; name another file, or remove it"
            )
        above = next(path for path in self.out.absolute().parents if path.exists())
        if not (above.is_dir() and os.access(above, os.W_OK)):
            raise ConfigError(
                f"--out {self.out}: cannot be created: {above} is not a folder that you may"
                " write to"
            )
        has_lines = self.part.exists() and self.part.stat().st_size > 0
        other = self._other_fact() if has_lines else None
        if other:
            begun = f"{self.part} was begun with another {other}"
            raise ConfigError(f"--out {self.out}: {begun}; remove that file, or name another --out")

    def begin(self) -> int:
        """Create the part, or truncate it after its last whole line; return its number of lines.

        Raises OSError, also if another process is writing it, such as a rank that survived a crash.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.part.touch()
        self._lock = self.part.open("rb")
        try:
            lock(self._lock)
        except BlockingIOError:
            raise OSError(errno.EAGAIN, "another process is writing it", str(self.part)) from None
        write_atomically(self._about, strict_json(self.facts, indent=1))
        lines, end = _whole_lines(self.part)
        os.truncate(self.part, end)
        return lines

    def add(self, lines: list[str]) -> None:
        """Append lines, which are on the disk when this returns; raises OSError."""
        with self.part.open("a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Give the part, which has all lines, its name."""
        self.part.replace(self.out)
        self._about.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process write the part."""
        if self._lock:
            self._lock.close()

    def _other_fact(self) -> str | None:
        """Return the name of a fact that was another one for the lines that are there.

        That is the first fact if none can be read: then nothing is known about the lines.
        """
        try:
            recorded = json.loads(self._about.read_text(encoding="utf-8"))
            for name, value in self.facts.items():
                if recorded.get(name) != value:
                    return name
        except (OSError, ValueError, AttributeError):
            return next(iter(self.facts))
        return None


def _whole_lines(file: Path) -> tuple[int, int]:
    """Return the number of lines that end with a newline, and the position after the last."""
    lines = 0
    end = 0
    position = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            newlines = block.count(b"\n")
            if newlines:
                lines += newlines
                end = position + block.rindex(b"\n") + 1
            position += len(block)
    return lines, end
