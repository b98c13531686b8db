"""Read and check rows of tagged words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distcore import DataError, nearest
from distcore_data import Record, Source, data_format, describe_value, source_name
from distcore_tasks.shared.classification.labels import (
    forms_problem,
    id_problem,
    label_problem,
    same_but_for_form,
)
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows, checked, read_rows, stream_rows
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.token_classification.options import Columns

Tag = int | str
"""A tag in a data file."""


@dataclass(frozen=True)
class Tagged(Rows[Any]):
    """Words and their tags, in file order.

    The value of each row has its words, at least one, none of them blank, their tags, all integers
    from 0 or all strings, and the user's id, if there is a column of ids.
    """

    def tags(self) -> Iterator[Tag]:
        """Yield the tag of each word."""
        for _, tags, *_ in self.values:
            yield from tags


def read_tagged(source: Source, columns: Columns, most_bad_rows: int | None = None) -> Tagged:
    """Read a data file or split. Raises DataError with file, row, problem and remedy.

    ``most_bad_rows``: those of rows that are read by number; ``None``: all are read now.
    """
    if data_format(source) == ".csv":
        raise DataError(
            f"{source_name(source)}: CSV has no lists, which words and tags are; use .json, .jsonl"
            " or .parquet"
        )
    schema = schema_of(columns)
    rows = (
        read_rows(source, schema)
        if most_bad_rows is None
        else stream_rows(source, schema, most_bad_rows)
    )
    return Tagged(rows.name, rows.values)


def schema_of(columns: Columns) -> Schema[Record]:
    """Return what is read of a row."""
    asked = {"columns.tokens": columns.tokens, "columns.tags": columns.tags}
    asked |= {"columns.id": columns.id} if columns.id else {}
    return Schema(asked, _Problem(), tuple)


def check_tagged(name: str, records: Iterable[tuple[object, ...]]) -> Tagged:
    """Return checked records, (words, tags) or (words, tags, id). Raises DataError;
    messages start with ``name``.
    """
    return Tagged(name, list(checked(name, records, schema_of(Columns()))))


@dataclass(slots=True)
class _Problem:
    """What is wrong with a record. All tags must be of the type of the first one that
    it is asked about.
    """

    first: Tag | None = None
    where: str = "row 1 has"

    def __call__(self, record: Record) -> str | None:
        words, tags, *named = record
        problem = words_problem(words) or _tags_problem(words, tags, self) or id_problem(named)
        if self.first is None and problem:
            self.where = "an earlier row has"
        elif self.first is None:
            self.first = tags[0]  # type: ignore[index]  # a list, as checked above
        return problem


def words_problem(words: object) -> str | None:
    """Return the problem of a row's words; ``None`` if they have none."""
    if not isinstance(words, list):
        return f"tokens is {describe_value(words)}, expected a list of strings, one per word"
    if not words:
        return "tokens is an empty list: fill it in or remove the row"
    return next(
        filter(
            None, (text_problem(word, f"word {number}") for number, word in enumerate(words, 1))
        ),
        None,
    )


def _tags_problem(words: Any, tags: object, known: _Problem) -> str | None:
    if not isinstance(tags, list):
        return f"tags is {describe_value(tags)}, expected a list with one tag per word"
    if len(tags) != len(words):
        return f"{len(words)} words have {len(tags)} tags: each word needs one"
    for number, tag in enumerate(tags, 1):
        if problem := label_problem(
            tag, tags[0] if known.first is None else known.first, known.where
        ):
            return f"word {number} ({words[number - 1]!r}): {problem.replace('label', 'tag', 1)}"
    return None


def distinct_tags(rows: Tagged) -> list[Tag]:
    """Return the sorted distinct tags. Their indices are the class numbers.

    Raises DataError if there are fewer than two, or if two are one text in two Unicode forms.
    """
    tags: list[Tag] = sorted(set(rows.tags()))
    if alike := same_but_for_form(tags):
        raise DataError(f"{rows.name}: tag {forms_problem(*alike)}")
    if len(tags) < 2:
        raise DataError(
            f"{rows.name}: all words have the tag {tags[0]!r}: a classifier needs at least 2 tags"
        )
    return tags


def encode_tags(
    values: Iterable[Any], classes: Sequence[str], refuse: Refuse
) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the words of each row with their class numbers. Refuses rows with a tag
    that is not a class.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for place, (words, tags, *_) in enumerate(values):
        for word, tag in zip(words, tags, strict=True):
            if str(tag) not in numbers:
                known = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
                alike = same_but_for_form([*classes, str(tag)])
                hint = (
                    f": {forms_problem(*alike)}"
                    if alike
                    else f"{nearest(str(tag), classes)}; training has: {known}"
                )
                refuse(
                    place,
                    f"tag {tag!r} of the word {word!r} is out of range: training lacks it{hint}",
                )
        yield words, [numbers.get(str(tag), 0) for tag in tags]
