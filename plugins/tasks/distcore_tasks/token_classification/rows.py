"""Read and check rows of tagged words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from distcore import DataError, nearest
from distcore_data import Record, Source, data_format, describe_value, read_records, row_error, source_name
from distcore_tasks.shared.classification.labels import id_problem, label_problem
from distcore_tasks.shared.lazy_rows import LazyValues, Values, read_values
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.shared.splits import Part
from distcore_tasks.token_classification.options import Columns

Tag = int | str
"""A tag in a data file."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """Words and their tags, in file order; implements ``distcore_tasks.shared.splits.Rows``."""

    name: str
    """Name of these rows in error messages, such as ``data file sentences.jsonl``."""
    values: Values[tuple[list[str], list[Tag]]]
    """Words of each row, at least one, none of them blank, and their tags: all integers from 0, or all strings."""
    ids: list[int | str] | None = None
    """The user's id of each row; ``None`` without a column of ids."""

    def tags(self) -> Iterator[Tag]:
        """Yield the tag of each word."""
        for _, tags in self.values:
            yield from tags


def read_tagged(source: Source, columns: Columns) -> Tagged:
    """Read a data file or split. Raises DataError with the row, counted from 1, its problem and the remedy."""
    if data_format(source) == ".csv":
        raise DataError(
            f"{source_name(source)}: CSV has no lists, which words and tags are; use .json, .jsonl or .parquet"
        )
    asked = {"columns.tokens": columns.tokens, "columns.tags": columns.tags}
    asked |= {"columns.id": columns.id} if columns.id else {}
    name, ids = source_name(source), list[Any]()
    records = read_values(
        source, lambda: _checked(name, read_records(source, asked)), lambda record: ids.extend(record[2:])
    )
    return _tagged(name, records, ids)


def check_tagged(name: str, records: Iterable[tuple[object, ...]]) -> Tagged:
    """Return checked records, (words, tags) or (words, tags, id). Raises DataError; messages start with ``name``."""
    rows = list(_checked(name, records))
    return _tagged(name, rows, [named for row in rows for named in row[2:]])


def _checked(name: str, records: Iterable[tuple[object, ...]]) -> Iterator[Record]:
    """Yield the records after a check."""
    first: Tag | None = None
    for number, record in enumerate(records, 1):
        words, tags, *named = record
        if problem := words_problem(words) or _tags_problem(words, tags, first) or id_problem(named):
            raise row_error(name, number, problem)
        first = tags[0] if first is None else first  # type: ignore[index]  # a list, as checked above
        yield record


def _tagged(name: str, records: Values[Any], ids: list[Any]) -> Tagged:
    """Return checked records as rows. Keeps only ``ids``, of all records, in memory."""
    if not len(records):
        raise DataError(f"{name}: holds no rows")
    return Tagged(name, LazyValues(lambda: ((words, tags) for words, tags, *_ in records), len(records)), ids or None)


def words_problem(words: object) -> str | None:
    """Return the problem of a row's words; ``None`` if they have none."""
    if not isinstance(words, list):
        return f"tokens is {describe_value(words)}, expected a list of strings, one per word"
    if not words:
        return "tokens is an empty list: fill it in or remove the row"
    return next(filter(None, (text_problem(word, f"word {number}") for number, word in enumerate(words, 1))), None)


def _tags_problem(words: Any, tags: object, first: Tag | None) -> str | None:
    if not isinstance(tags, list):
        return f"tags is {describe_value(tags)}, expected a list with one tag per word"
    if len(tags) != len(words):
        return f"{len(words)} words have {len(tags)} tags: each word needs one"
    for number, tag in enumerate(tags, 1):
        if problem := label_problem(tag, tags[0] if first is None else first):
            return f"word {number} ({words[number - 1]!r}): {problem.replace('label', 'tag', 1)}"
    return None


def distinct_tags(rows: Tagged) -> list[Tag]:
    """Return the sorted distinct tags. Their indices are the class numbers.

    Raises DataError if there are fewer than two.
    """
    tags: list[Tag] = sorted(set(rows.tags()))
    if len(tags) < 2:
        raise DataError(f"{rows.name}: all words have the tag {tags[0]!r}: a classifier needs at least 2 tags")
    return tags


def encode_tags(part: Part[Tagged], classes: list[str]) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the words of each row with their class numbers. Raises DataError for a tag that is not a class."""
    numbers = {name: number for number, name in enumerate(classes)}
    for place, (words, tags) in enumerate(part.values()):
        for word, tag in zip(words, tags, strict=True):
            if str(tag) not in numbers:
                known = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
                hint = f"{nearest(str(tag), classes)}; training has: {known}"
                raise part.problem(place, f"tag {tag!r} of the word {word!r} is out of range: training lacks it{hint}")
        yield words, [numbers[str(tag)] for tag in tags]
