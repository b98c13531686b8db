"""Metrics of tagging: of entities, as in conlleval, for IOB tags, else of single tags."""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

Sentences = Sequence[Sequence[str]]
"""The tags of each row."""
Rows = Iterable[tuple[Any, ...]]
"""Words of each row, and their tags."""
NAMES = ("accuracy", "precision", "recall", "f1", "classification_report")
"""Keys of ``tag_metrics``."""


def is_iob(classes: Sequence[str]) -> bool:
    """Return True for ``B-…`` and ``I-…``, also ``E-…`` and ``S-…``, with ``O`` for other words."""
    has_entities = any(name != "O" for name in classes)
    return has_entities and all(re.fullmatch(r"O|[BIES]-.+", name) for name in classes)


def tag_metrics(tags: Sentences, predicted: Sentences, classes: Sequence[str]) -> dict[str, object]:
    """Return ``accuracy`` over words, ``precision``, ``recall``, ``f1`` and the report as text.

    For IOB tags, precision, recall and F1 are those of entities; an entity is correct if its words
    and its kind are. For other tags they are means over the tags that occur. All values are
    ``None`` without a word.
    """
    flat = list(chain.from_iterable(tags))
    flat_predicted = list(chain.from_iterable(predicted))
    if not flat:
        return dict.fromkeys(NAMES)
    right = sum(map(operator.eq, flat, flat_predicted))
    accuracy = right / len(flat)
    from sklearn.metrics import classification_report, precision_recall_fscore_support

    average = "macro"
    kinds = None
    if is_iob(classes):
        average = "micro"
        true = entities(tags)
        guessed = entities(predicted)
        kinds = sorted({entity.kind for entity in true | guessed})
        if not kinds:
            return dict(zip(NAMES, (accuracy, 0.0, 0.0, 0.0, "no entities"), strict=True))
        candidates = sorted(true | guessed)
        flat = _kinds_of(candidates, true)
        flat_predicted = _kinds_of(candidates, guessed)
    scores = precision_recall_fscore_support(
        flat, flat_predicted, labels=kinds, average=average, zero_division=0
    )
    text = classification_report(flat, flat_predicted, labels=kinds, digits=4, zero_division=0)
    precision, recall, f1 = (float(score) for score in scores[:3])
    return dict(zip(NAMES, (accuracy, precision, recall, f1, text), strict=True))


def _kinds_of(candidates: Sequence[Entity], present: set[Entity]) -> list[str]:
    """Return the kind of each candidate that is ``present``, and ``O`` for others."""
    kinds = [entity.kind if entity in present else "O" for entity in candidates]
    # With one more that is none, sklearn's table always has a line for all kinds together.
    return [*kinds, "O"]


class Entity(NamedTuple):
    """Words that are one name, and of which kind."""

    row: int
    """Index of its row."""
    first: int
    """Index of its first word in the row."""
    last: int
    """Index of its last word."""
    kind: str
    """Type of entity, such as ``PER``."""


def entities(rows: Sentences) -> set[Entity]:
    """Return the entities of rows of IOB tags, as conlleval has them.

    One begins at ``B`` and ``S``, where the kind changes, and at any other tag after ``O``, ``E``
    and ``S``.
    """
    entities_of_rows = set()
    for row, tags in enumerate(rows):
        before = "O"
        start = 0
        # The last O ends an entity that lasts to the end of the row.
        for index, tag in enumerate([*tags, "O"]):
            is_other_kind = tag[2:] != before[2:]
            begins = tag[0] in "BSO" or before[0] in "OES" or is_other_kind
            if begins and before != "O":
                entities_of_rows.add(Entity(row, start, index - 1, before[2:]))
            if begins:
                start = index
            before = tag
    return entities_of_rows


class Lookup:
    """The baseline that gives each word its most frequent tag in training, and unknown words
    the most frequent tag.
    """

    def __init__(self, rows: Rows) -> None:
        """Count the tags of words in ``rows``, the training rows."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for words, tags, *_ in rows:
            for word, tag in zip(words, tags, strict=True):
                counts[word][str(tag)] += 1
        total = sum(counts.values(), Counter[str]())
        self.commonest = _commonest(total)
        self._of_word = {word: _commonest(tag_counts) for word, tag_counts in counts.items()}

    def facts(self, rows: Rows, classes: Sequence[str]) -> dict[str, object]:
        """Return the baseline's facts: the share of the most frequent tag, accuracy and F1."""
        # One string per class: tags of all rows are in memory, but not words.
        names = {name: name for name in classes}
        tags = []
        predicted = []
        for words, tagged, *_ in rows:
            tags.append([names[str(tag)] for tag in tagged])
            predicted.append([self._of_word.get(word, self.commonest) for word in words])
        metrics = tag_metrics(tags, predicted, classes)
        words_with_commonest = sum(row.count(self.commonest) for row in tags)
        all_words = sum(map(len, tags))
        return {
            "majority_share": round(words_with_commonest / all_words, 4),
            "lookup_accuracy": round(float(str(metrics["accuracy"])), 4),
            "lookup_f1": round(float(str(metrics["f1"])), 4),
        }


def _commonest(tags: Counter[str]) -> str:
    """Return the most frequent tag; of equally frequent ones the first that was counted."""
    ((tag, _),) = tags.most_common(1)
    return tag
