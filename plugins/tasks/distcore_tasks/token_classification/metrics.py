"""How well words are tagged: entities as conlleval counts them where tags are IOB, tags themselves elsewhere."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

Sentences = Sequence[Sequence[str]]
"""The tags of each row."""
Rows = Iterable[tuple[Sequence[str], Sequence[object]]]
"""Words of each row, and their tags."""
NAMES = ("accuracy", "precision", "recall", "f1", "classification_report")
"""What ``tag_metrics`` returns."""


def is_iob(classes: Sequence[str]) -> bool:
    """Whether tags name entities: ``B-…`` and ``I-…`` (also ``E-…``, ``S-…``) for their words, ``O`` for all others."""
    return any(name != "O" for name in classes) and all(re.fullmatch(r"O|[BIES]-.+", name) for name in classes)


def tag_metrics(tags: Sentences, predicted: Sentences, classes: Sequence[str]) -> dict[str, object]:
    """Return ``accuracy`` over words, ``precision``, ``recall``, ``f1`` and ``classification_report``.

    Of IOB tags the three are those of entities: one is right if its words and its kind are. Of others they are the
    means over the tags that occur. All are ``None`` without a word.
    """
    flat, flat_predicted = ([tag for row in rows for tag in row] for rows in (tags, predicted))
    if not flat:
        return dict.fromkeys(NAMES)
    accuracy = sum(one == other for one, other in zip(flat, flat_predicted, strict=True)) / len(flat)
    if is_iob(classes):
        from seqeval.metrics import classification_report
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

        scores = precision_recall_fscore_support(list(tags), list(predicted), average="micro", zero_division=0)
        text = classification_report(list(tags), list(predicted), digits=4, zero_division=0)
    else:
        from sklearn.metrics import classification_report, precision_recall_fscore_support

        scores = precision_recall_fscore_support(flat, flat_predicted, average="macro", zero_division=0)
        text = classification_report(flat, flat_predicted, digits=4, zero_division=0)
    precision, recall, f1 = (float(score) for score in scores[:3])
    return dict(zip(NAMES, (accuracy, precision, recall, f1, text), strict=True))


class Lookup:
    """The baseline: each word gets the tag that it has most often in training, others the commonest tag of all."""

    def __init__(self, rows: Rows) -> None:
        """``rows`` are those of training."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for words, tags in rows:
            for word, tag in zip(words, tags, strict=True):
                counts[word][str(tag)] += 1
        self.commonest = sum(counts.values(), Counter[str]()).most_common(1)[0][0]
        self._of_word = {word: tag_counts.most_common(1)[0][0] for word, tag_counts in counts.items()}

    def facts(self, rows: Rows, classes: Sequence[str]) -> dict[str, object]:
        """Return what the report says of rows: the share of the commonest tag, and how well this does."""
        names = {name: name for name in classes}  # one string per class: tags of all rows are in memory, but not words
        tags, predicted = [], []
        for words, tagged in rows:
            tags.append([names[str(tag)] for tag in tagged])
            predicted.append([self._of_word.get(word, self.commonest) for word in words])
        metrics = tag_metrics(tags, predicted, classes)
        return {
            "majority_share": round(sum(row.count(self.commonest) for row in tags) / sum(map(len, tags)), 4),
            "lookup_accuracy": round(float(str(metrics["accuracy"])), 4),
            "lookup_f1": round(float(str(metrics["f1"])), 4),
        }
