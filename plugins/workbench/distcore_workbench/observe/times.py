"""The file ``times.jsonl`` of a run folder: how far each attempt was, when, and its
seconds by phase until then.

An attempt is a start of the run's ranks: the first, or one that resumes. Lines are only added, so
that the file has all attempts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcore.files import strict_json

FILE = "times.jsonl"


class TimesFile:
    """Adds the lines of one attempt."""

    def __init__(self, out: Path, step: int, began: float) -> None:
        """Begin an attempt at ``step``, by ranks that were started at
        ``began``, seconds since 1970.
        """
        self._file, self._ended = out / FILE, False
        # an attempt was killed as it wrote
        if self._file.is_file() and not self._file.read_bytes().endswith(b"\n"):
            self._append("")
        self.add("start", step, at=began)

    def add(
        self,
        event: str,
        step: int,
        at: float | None = None,
        values: Mapping[str, object] | None = None,
    ) -> None:
        """Add a line, if that of the end is not there."""
        if not self._ended:
            self._append(
                strict_json(
                    {
                        "event": event,
                        "at": time.time() if at is None else at,
                        "step": step,
                        **(values or {}),
                    }
                )
            )
        self._ended = self._ended or event == "end"

    def _append(self, line: str) -> None:
        # Not held open: a process may be killed before it could close the file.
        with self._file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A line of the file."""

    event: str
    """``start``, ``log``, ``evaluation``, ``saving``, ``checkpoint`` or ``end``."""
    at: float
    """Seconds since 1970."""
    step: int
    """Optimizer steps of the run."""
    seconds: Mapping[str, float]
    """Seconds of the main rank by phase since the attempt began; empty for its start."""
    waited: float
    """Seconds among those of training in which ranks waited for the slowest
    one, mean over ranks.
    """
    ranks: Mapping[str, Mapping[str, float]]
    """What ranks sent since the moment before, by their number."""
    slow: Sequence[str] = ()
    """Lines about ranks that were slower than the others."""


def attempts_of(folder: Path) -> list[list[Moment]]:
    """Return the moments of each attempt; none for a run that was not observed.

    A line that was cut off is left out.
    """
    attempts: list[list[Moment]] = []
    file = folder / FILE
    if not file.is_file():
        return attempts
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        moment = _moment(text)
        if moment is not None and moment.event == "start":
            attempts.append([])
        if moment is not None and attempts:
            attempts[-1].append(moment)
    return attempts


def _moment(text: str) -> Moment | None:
    try:
        line: dict[str, Any] = json.loads(text)
        return Moment(
            event=str(line["event"]),
            at=float(line["at"]),
            step=int(line["step"]),
            seconds=line.get("seconds", {}),
            waited=float(line.get("waited", 0.0)),
            ranks=line.get("ranks", {}),
            slow=line.get("slow", ()),
        )
    except (ValueError, LookupError, TypeError):
        return None
