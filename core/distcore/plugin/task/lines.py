"""Lines of predictions as a task gives them, checked and written as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distcore.errors import TaskError
from distcore.plugin.task.outputs import checked_json
from distcore.plugin.task.task import FileRows


def objects(lines: Iterable[object]) -> Iterator[dict[str, object]]:
    """Yield the lines of a task's ``predictions``; raises TaskError for a line that is not a dict."""
    for line in lines:
        if not isinstance(line, dict):
            raise TaskError(f"task: predictions() gave {type(line).__name__} as a line; expected a dict")
        yield line


def tested_lines(lines: Iterable[dict[str, object]]) -> Iterator[str]:
    """Yield the lines of predictions.jsonl; raises TaskError for a line that is not JSON."""
    return map(_line, lines)


def row_lines(lines: Iterable[dict[str, object]], rows: FileRows) -> list[str]:
    """Return one line for each of ``rows``; raises TaskError for too many or too few of them.

    A line begins with file, row and, if known, id. It has no ``index``, which counts test rows. A ``file`` from the
    task replaces file and row.
    """
    given = list(lines)
    if len(given) != len(rows.records):
        raise TaskError(f"task: predictions() gave {len(given)} lines for {len(rows.records)} rows")
    written = []
    for place, line in enumerate(given):
        line.pop("index", None)
        where = {} if "file" in line else {"file": rows.file, "row": rows.start + place}
        named = {} if rows.ids is None else {"id": rows.ids[place]}
        written.append(_line(where | named | line))
    return written


def _line(values: dict[str, object]) -> str:
    return checked_json("predictions() gave a line that is not JSON", values) + "\n"
