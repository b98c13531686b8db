"""Sources of a task's rows: data files, splits of datasets, and embedded datasets."""

from __future__ import annotations

import glob
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

from distcore import ConfigError, DataError, nearest
from distcore_data import (
    Filtered,
    Source,
    Split,
    describe_value,
    files_of,
    find_split,
    source_digest,
    source_name,
)
from distcore_tasks.shared import stdlib
from distcore_tasks.shared.options import EVALUATION, Filter, TaskOptions
from distcore_tasks.shared.pretrained import own_code_warning, rotation_warning

R = TypeVar("R")
OPEN = "CHOOSE"
"""What ``distcore migrate`` writes in place of data that no source says."""
ALL = Filter()
"""Keeps all rows."""
HELD_OUT = {"validation": "eval_data", "test": "test_data"}
"""Map the names of held-out splits to their options."""


def source_file(source: str, embedded: Collection[str], rows: Filter = ALL) -> Source:
    """Return the data file or split that ``source`` names, or those of its rows that
    the filter ``rows`` keeps.

    Raises DataError for a bare word that is no file, split or embedded dataset.
    """
    opened = find_split(source) or _file(source, embedded)
    return opened if rows.column is None else Filtered(opened, rows.column, rows.matches or "")


def _file(source: str, embedded: Collection[str]) -> Path:
    path = Path(source).expanduser()
    if source == OPEN:
        raise DataError(
            f"data = {OPEN}: this config leaves the rows open; name files there, or by --data FILE"
        )
    is_word = (
        not path.suffix and path.name == source and "," not in source and not glob.has_magic(source)
    )
    if is_word and not path.exists():
        known = ", ".join(embedded)
        hint = nearest(source, embedded)
        raise DataError(
            f"data {source!r}: neither a file nor an embedded dataset{hint} (embedded: {known})"
        )
    # messages stay short
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def check_filter(options: TaskOptions) -> None:
    """Raise ConfigError for a filter of an embedded dataset."""
    given = [source for source in options.sources.values() if source in options.embedded]
    if given and options.filter.column:
        files = "a filter is for files and for datasets of the library datasets"
        raise ConfigError(
            f"filter.column = {options.filter.column!r}: {given[0]} has no such column; {files}"
        )


@cache  # a process prepares its data more than once
def say_embedded(source: str) -> None:
    """Say that a run takes rows that nobody gave it."""
    logging.getLogger("distcore").info(
        "data: %s, which comes with distcore; --data names your own", source
    )


def rows_name(source: str, options: TaskOptions) -> str:
    """Return the name of a source's rows in messages."""
    known = options.embedded
    return (
        f"dataset {source}"
        if source in known
        else source_name(source_file(source, known, options.filter))
    )


def source_label(source: str, options: TaskOptions) -> str:
    """Return the name of a source in predictions. Absolute and relative paths
    give the same name.
    """
    known = options.embedded
    return source if source in known else str(source_file(source, known, options.filter))


def source_digests(
    options: TaskOptions, embedded: Collection[str], made_from: tuple[object, ...]
) -> list[object]:
    """Return a digest of each source's content, ``None`` for an absent one, for a cache key; those
    of sets by name.

    ``made_from``: everything that the rows of embedded datasets depend on. Raises DataError.
    """

    def digest_of(source: str) -> str:
        return (
            stdlib.fingerprint(source, *made_from)
            if source in embedded
            else source_digest(source_file(source, embedded, options.filter))
        )

    held_out: dict[str, str] = {}
    for name, source in options.held_out.items():
        with naming(name):
            held_out[name] = digest_of(source)
    test, evaluation = held_out.pop("test", None), held_out.pop("evaluation", None)
    return [digest_of(options.data), held_out or evaluation, test]


def data_warnings(options: TaskOptions) -> Iterator[str]:
    """Yield a warning for evaluation on training data, an unused fraction, and held-out splits
    that are not used.
    """
    if not options.from_scratch:
        yield from own_code_warning(options.model, options.model_folder())
        tokens = getattr(options, "max_seq_len", None) or 0  # images have none
        yield from rotation_warning(options.model, options.model_folder(), tokens)
    yield from _trained_on(options)
    if options.eval_data is not None and options.eval_fraction != type(options).eval_fraction:
        yield (
            f"--eval-fraction {options.eval_fraction}: not used, because --eval-data names the rows"
        )
    given = {"data": options.data, "eval_data": options.eval_data, "test_data": options.test_data}
    sources = {"train": options.data} | options.held_out
    splits = {
        name: find_split(text) for name, text in sources.items() if text not in options.embedded
    }
    train, used = splits.pop("train", None), set(map(str, splits.values()))
    if train is None:
        return
    left = {
        name: option
        for name, option in HELD_OUT.items()
        if name in train.others and given[option] is None
    }
    left = {f"{train.dataset}@{name}": option for name, option in left.items()}
    unused = [
        f"--{option.replace('_', '-')} {split}"
        for split, option in left.items()
        if split not in used
    ]
    if unused:
        yield (
            f"dataset {train.dataset}: has splits that are not used; to use them:"
            f" {' '.join(unused)}"
        )


def _trained_on(options: TaskOptions) -> Iterator[str]:
    """Yield a warning for each held-out source with files that are trained on, by whatever name."""
    trained = _identities(options.data, options)
    for name, source in options.held_out.items():
        held_out = _identities(source, options)
        if not trained.keys() & held_out.keys():
            continue
        flag = "--test-data " if name == "test" else f"--eval-data {set_name(name)}"
        others = held_out.keys() - trained.keys()
        what = (
            f"has {next(held_out[key] for key in held_out if key in trained)}, which"
            if others
            else "is what"
        )
        also = "" if others or source == options.data else f" ({options.data})"
        yield (
            f"{flag}{source}: {what} is trained on{also}; its metrics say nothing about other rows"
        )


def _identities(source: str, options: TaskOptions) -> dict[object, str]:
    """Return the names of a source's files by what identifies each: a link to a
    file is that file.
    """
    if source in options.embedded:
        return {source: source}
    try:
        opened = source_file(source, options.embedded)
        assert not isinstance(opened, Filtered)  # no filter was asked for
        files = list(opened.files) if isinstance(opened, Split) else files_of(opened) or [opened]
    except DataError:  # such as of a folder of images that is remote
        return {source: source}
    names = dict[object, str]()
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # a copy that is not there
            names[str(file)] = str(file)
        else:
            names[stat.st_dev, stat.st_ino] = str(file)
    return names


def set_name(dataset: str) -> str:
    """Return the name of an evaluation set as ``--eval-data`` has it: ``NAME=``;
    empty for other datasets.
    """
    return f"{dataset.removeprefix(EVALUATION)}=" if dataset.startswith(EVALUATION) else ""


@contextmanager
def naming(dataset: str) -> Iterator[None]:
    """Begin the message of a DataError with the name of the evaluation set,
    if there are several.
    """
    try:
        yield
    except DataError as error:
        raise (
            DataError(f"evaluation set {set_name(dataset)[:-1]}: {error}")
            if set_name(dataset)
            else error
        ) from None


def text_problem(text: object, name: str = "text") -> str | None:
    """Return the problem of a row's text; ``None`` if it can be tokenized. ``name``: that of
    the text in messages.
    """
    if not isinstance(text, str):
        return f"{name} is {describe_value(text)}, expected a string"
    if not text or text.isspace():
        return f"{name} is empty: fill it in or remove the row"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{name} is not valid Unicode: lone surrogate at character {error.start + 1}"
    return None
