"""A pytest plugin that notes which lines each test runs, in its own process and in ranks that
are forked from it.

``MUTATION_TARGETS`` has the folders and files that count, separated by colons,
below the working directory;
``MUTATION_LINES`` is the file for the notes: a JSON object a line, with ``test`` and ``seconds``
and ``passed`` when a test ends, with ``file`` and ``line`` when it runs a line for the first time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

TARGETS = tuple(str(Path.cwd() / target) for target in os.environ["MUTATION_TARGETS"].split(":"))
NOTES = os.open(os.environ["MUTATION_LINES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
FIRST = len(str(Path.cwd())) + 1


class _Lines:
    def __init__(self) -> None:
        self.test = ""
        self.seen: set[tuple[str, int]] = set()
        self.failed = False

    def calls(self, frame: FrameType, event: str, argument: object) -> Any:
        return self.lines if frame.f_code.co_filename.startswith(TARGETS) else None

    def lines(self, frame: FrameType, event: str, argument: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in self.seen:
            self.seen.add(place)
            _note(test=self.test, file=place[0][FIRST:], line=place[1])
        return self.lines


def _note(**fields: object) -> None:
    os.write(NOTES, f"{json.dumps(fields)}\n".encode())


_RECORD = _Lines()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace one test."""
    _RECORD.test, _RECORD.seen, _RECORD.failed = item.nodeid, set(), False
    began = time.monotonic()
    threading.settrace(_RECORD.calls)
    sys.settrace(_RECORD.calls)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        _note(
            test=item.nodeid, seconds=round(time.monotonic() - began, 3), passed=not _RECORD.failed
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what did not pass; a skipped test says nothing about a mutant either."""
    _RECORD.failed |= report.outcome != "passed"
