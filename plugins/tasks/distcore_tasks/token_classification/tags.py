"""Tagged words, their checks, and the numbers of their tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distcore import DataError, nearest
from distcore_data import Record, describe_value
from distcore_tasks.rows.pipeline import Refuse
from distcore_tasks.shared.classification.labels import (
    forms_problem,
    id_problem,
    label_problem,
    same_but_for_form,
)
from distcore_tasks.shared.sources import text_problem

Tag = int | str
"""A tag in a data file."""


class TaggedWords(NamedTuple):
    """Words of a row, at least one, none of them blank, with their tags."""

    words: list[str]
    """The words."""
    tags: list[Tag]
    """The tag of each word: all are integers from 0, or all are strings."""
    id: int | str | None = None
    """The user's id of the row, if there is a column of ids."""


def tagged_words(record: Record) -> TaggedWords:
    """Return the value of a checked record: words, tags and, if there is a column of them, id.

    A row to predict has no tags.
    """
    words, *others = record
    parts: Any = [words, *(others or [[]])]
    return TaggedWords(*parts)


@dataclass(slots=True)
class TagChecker:
    """Says what is wrong with a record of a source. All tags must be of the type of the first one
    that it is asked about.
    """

    first: Tag | None = None
    """The first tag."""
    where: str = "row 1 has"
    """Where it is, for messages."""

    def __call__(self, record: Record) -> str | None:
        """Return the problem of the next record; ``None`` if it has none."""
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


def _tags_problem(words: Any, tags: object, known: TagChecker) -> str | None:
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


def distinct_tags(name: str, rows: Iterable[TaggedWords]) -> list[Tag]:
    """Return the sorted distinct tags. Their indices are the class numbers.

    Raises DataError, whose message begins with ``name``, if there are fewer than two, or if two are
    one text in two Unicode forms.
    """
    seen = set[Tag]()
    for row in rows:
        seen.update(row.tags)
    tags: list[Tag] = sorted(seen)
    if alike := same_but_for_form(tags):
        raise DataError(f"{name}: tag {forms_problem(*alike)}")
    if len(tags) < 2:
        raise DataError(
            f"{name}: all words have the tag {tags[0]!r}: a classifier needs at least 2 tags"
        )
    return tags


def tag_numbers(
    rows: Sequence[TaggedWords], classes: Sequence[str], refuse: Refuse
) -> list[list[int]]:
    """Return the class number of each word of each row. Refuses rows with a tag that is no
    class.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for place, row in enumerate(rows):
        for word, tag in zip(row.words, row.tags, strict=True):
            if str(tag) not in numbers:
                problem = f"tag {tag!r} of the word {word!r} is out of range: training lacks it"
                refuse(place, f"{problem}{_hint(str(tag), classes)}")
    return [[numbers.get(str(tag), 0) for tag in row.tags] for row in rows]


def _hint(tag: str, classes: Sequence[str]) -> str:
    """Return the end of a message about a tag that is no class."""
    if alike := same_but_for_form([*classes, tag]):
        return f": {forms_problem(*alike)}"
    known = ", ".join(classes[:20]) + (", …" if len(classes) > 20 else "")
    return f"{nearest(tag, classes)}; training has: {known}"
