"""Where a task's rows come from: a data file, or a data set that comes with the task."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from distcore.data.files import describe_value
from distcore.errors import DataError, nearest


def source_file(source: str, embedded: Collection[str]) -> Path:
    """Return the path of a data file; raises DataError for a bare word that is neither a file nor an embedded set."""
    path = Path(source).expanduser()
    if not path.exists() and not path.suffix and path.name == source:
        known = ", ".join(embedded)
        hint = nearest(source, embedded)
        raise DataError(f"data {source!r}: neither a file nor an embedded data set{hint} (embedded: {known})")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path  # messages stay short


def path_options(task: object, built_in: Collection[str]) -> tuple[str, ...]:
    """Return the options of ``task`` for model and data that are none of the ``built_in`` names, so are paths."""
    names = ("model", "data", "eval_data", "test_data")
    return tuple(name for name in names if getattr(task, name) is not None and getattr(task, name) not in built_in)


def source_name(source: str, embedded: Collection[str]) -> str:
    """Return what messages call the rows of a file or an embedded data set."""
    return f"data set {source}" if source in embedded else f"data file {source_file(source, embedded)}"


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
