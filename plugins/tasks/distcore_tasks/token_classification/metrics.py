"""Metrics of tagging: those of entities, as in conlleval, for IOB tags, else
those of single tags.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Sentences = Sequence[Sequence[str]]
"""The tags of each row."""
Rows = Iterable[tuple[Any, ...]]
"""Words of each row, and their tags."""
NAMES = ("accuracy", "precision", "recall", "f1", "classification_report")
"""Keys of ``tag_metrics``."""


def is_iob(classes: Sequence[str]) -> bool:
    """Return True for tags of entities: ``B-…`` and ``I-…`` (also ``E-…``, ``S-…``), and
    ``O`` for other words.
    """
    return any(name != "O" for name in classes) and all(
        re.fullmatch(r"O|[BIES]-.+", name) for name in classes
    )


def tag_metrics(tags: Sentences, predicted: Sentences, classes: Sequence[str]) -> dict[str, object]:
    """Return ``accuracy`` over words, ``precision``, ``recall``,
    ``f1`` and ``classification_report``.

    For IOB tags, precision, recall and F1 are those of entities; an entity is correct if its words
    and its kind are. For other tags they are means over the tags that occur. All values are
    ``None`` without a word.
    """
    flat, flat_predicted = ([tag for row in rows for tag in row] for rows in (tags, predicted))
    if not flat:
        return dict.fromkeys(NAMES)
    accuracy = sum(one == other for one, other in zip(flat, flat_predicted, strict=True)) / len(
        flat
    )
    from sklearn.metrics import classification_report, precision_recall_fscore_support

    average, kinds = "macro", None
    if is_iob(classes):
        average, true, guessed = "micro", entities(tags), entities(predicted)
        kinds = sorted({entity.kind for entity in true | guessed})
        if not kinds:
            return dict(zip(NAMES, (accuracy, 0.0, 0.0, 0.0, "no entities"), strict=True))
        every = sorted(true | guessed)
        # With one more that is none, the table always has a line for all kinds together.
        flat, flat_predicted = (
            [*(entity.kind if entity in those else "O" for entity in every), "O"]
            for those in (true, guessed)
        )
    scores = precision_recall_fscore_support(
        flat, flat_predicted, labels=kinds, average=average, zero_division=0
    )
    text = classification_report(flat, flat_predicted, labels=kinds, digits=4, zero_division=0)
    precision, recall, f1 = (float(score) for score in scores[:3])
    return dict(zip(NAMES, (accuracy, precision, recall, f1, text), strict=True))


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

    One begins at ``B`` and ``S``, where the kind changes, and at any other tag behind
    ``O``, ``E`` and ``S``.
    """
    every = set()
    for row, tags in enumerate(rows):
        before, start = "O", 0
        for index, tag in enumerate([*tags, "O"]):
            begins = tag[0] in "BSO" or before[0] in "OES" or tag[2:] != before[2:]
            if begins and before != "O":
                every.add(Entity(row, start, index - 1, before[2:]))
            if begins:
                start = index
            before = tag
    return every


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
        self.commonest = sum(counts.values(), Counter[str]()).most_common(1)[0][0]
        self._of_word = {
            word: tag_counts.most_common(1)[0][0] for word, tag_counts in counts.items()
        }

    def facts(self, rows: Rows, classes: Sequence[str]) -> dict[str, object]:
        """Return the baseline's facts for the report: the share of the most frequent
        tag, accuracy and F1.
        """
        # one string per class: tags of all rows are in memory, but not words
        names = {name: name for name in classes}
        tags, predicted = [], []
        for words, tagged, *_ in rows:
            tags.append([names[str(tag)] for tag in tagged])
            predicted.append([self._of_word.get(word, self.commonest) for word in words])
        metrics = tag_metrics(tags, predicted, classes)
        return {
            "majority_share": round(
                sum(row.count(self.commonest) for row in tags) / sum(map(len, tags)), 4
            ),
            "lookup_accuracy": round(float(str(metrics["accuracy"])), 4),
            "lookup_f1": round(float(str(metrics["f1"])), 4),
        }
