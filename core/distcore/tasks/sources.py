"""Where a task's rows come from: a data file, or a data set that comes with the task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from distcore.data.files import describe_value, digest
from distcore.errors import DataError, nearest
from distcore.tasks.options import TaskOptions

R = TypeVar("R")


def source_file(source: str, embedded: Collection[str]) -> Path:
    """Return the path of a data file; raises DataError for a bare word that is neither a file nor an embedded set."""
    path = Path(source).expanduser()
    if not path.exists() and not path.suffix and path.name == source:
        known = ", ".join(embedded)
        hint = nearest(source, embedded)
        raise DataError(f"data {source!r}: neither a file nor an embedded data set{hint} (embedded: {known})")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path  # messages stay short


def read_source(source: str, embedded: Mapping[str, Callable[[], R]], read: Callable[[Path], R]) -> R:
    """Return the rows of an embedded data set, or what ``read`` finds in a data file; raises DataError."""
    reader = embedded.get(source)
    return reader() if reader else read(source_file(source, embedded))


def source_name(source: str, embedded: Collection[str]) -> str:
    """Return what messages call the rows of a file or an embedded data set."""
    return f"data set {source}" if source in embedded else f"data file {source_file(source, embedded)}"


def source_said(source: str, embedded: Collection[str]) -> str:
    """Return what predictions call the source of a row, the same where its path was recorded as an absolute one."""
    return source if source in embedded else str(source_file(source, embedded))


def source_digests(
    options: TaskOptions, embedded: Collection[str], fingerprint: Callable[[str], str]
) -> list[str | None]:
    """Return a digest of what each source says, ``None`` for one that is not given, as a part of a cache key.

    ``fingerprint`` gives that of an embedded data set. Raises DataError.
    """

    def digest_of(source: str) -> str:
        return fingerprint(source) if source in embedded else digest(source_file(source, embedded))

    given = (options.data, options.eval_data, options.test_data)
    return [None if source is None else digest_of(source) for source in given]


def text_problem(text: object, name: str = "text") -> str | None:
    """Return what is wrong with a row's text, which messages call ``name``; ``None`` if it can be tokenised."""
    if not isinstance(text, str):
        return f"{name} is {describe_value(text)}, expected a string"
    if not text or text.isspace():
        return f"{name} is empty: fill it in or remove the row"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{name} is not valid Unicode: lone surrogate at character {error.start + 1}"
    return None
