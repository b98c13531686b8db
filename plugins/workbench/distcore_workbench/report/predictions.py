"""The predictions of a run's final test, from ``predictions.jsonl``: a matrix, or samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distcore import ConfigError

MOST_CLASSES = 20
"""Classes of a confusion matrix; of more, those with most rows are shown."""
SAMPLES = 5
"""Rows that are shown of a task without classes."""
MOST_CHARACTERS = 400
"""Characters that are shown of a text in a sample."""
WHERE = ("index", "file", "row", "id")
"""Keys of a line that say which row it is of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """A confusion matrix: how many rows of each class were predicted as which class."""

    classes: tuple[str, ...]
    """Sorted, or, of more than are shown, those with most rows."""
    counts: tuple[tuple[int, ...], ...]
    """``counts[i][j]``: rows of class i that were predicted as class j."""
    hidden_classes: int
    """Classes that are not shown."""


@dataclass
class _Seen:
    """The content of the lines read so far."""

    pairs: Counter[tuple[Any, Any]] = field(default_factory=Counter)
    first: list[dict[str, Any]] = field(default_factory=list)
    is_tagged: bool = False
    has_classes: bool = True


def answers_of(folder: Path) -> Confusion | list[dict[str, str]] | None:
    """Return the confusion matrix of a task with classes, of others the first rows.

    A row is texts by name. ``None`` without predictions. Raises ConfigError, which names file and
    line, for a line that is no JSON object.
    """
    file = folder / "predictions.jsonl"
    if not file.is_file():
        return None
    seen = _Seen()
    for line in _lines(file):
        if len(seen.first) < SAMPLES:
            seen.first.append(line)
        if not seen.has_classes:
            if len(seen.first) == SAMPLES:
                break
            continue
        pairs = _pairs(line)
        seen.has_classes = pairs is not None
        label = line.get("label")
        if isinstance(label, list) and len(set(label)) < len(label):
            seen.is_tagged = True
        seen.pairs.update(pairs or ())
    # Lists are the tags of words if one comes twice in a row; else they are the classes of a row
    # that has several, which are no rows and columns of a matrix.
    has_lists = bool(seen.first) and isinstance(seen.first[0].get("label"), list)
    is_one_class_each = seen.is_tagged or not has_lists
    if seen.pairs and seen.has_classes and is_one_class_each:
        return _confusion(seen.pairs)
    return [_as_texts(line) for line in seen.first] or None


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, one a line; raises ConfigError."""
    try:
        opened = file.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    with opened as texts:
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict):
                raise ConfigError(
                    f"{file}, line {number}: damaged, expected a JSON object: {text.strip()[:60]!r}"
                )
            yield line


def _pairs(line: dict[str, Any]) -> Sequence[tuple[Any, Any]] | None:
    """Return class and predicted class of the row, or of each of its words.

    Words without a class are left out. ``None`` if the row has no classes.
    """
    label = line.get("label")
    prediction = line.get("prediction")
    if isinstance(label, str | int) and isinstance(prediction, str | int):
        return [(label, prediction)]
    if not isinstance(label, list) or not isinstance(prediction, list):
        return None
    if len(label) != len(prediction):
        return None
    return [pair for pair in zip(label, prediction, strict=True) if None not in pair]


def _confusion(pairs: Counter[tuple[Any, Any]]) -> Confusion:
    """Return the confusion matrix of counted pairs of class and predicted class."""
    rows_by_class: Counter[Any] = Counter()
    for (label, prediction), count in pairs.items():
        rows_by_class[label] += count
        # A class that is only predicted has no rows, and is shown.
        rows_by_class[prediction] += 0
    most_common = [name for name, _ in rows_by_class.most_common(MOST_CLASSES)]
    # Numbers and texts cannot be compared: the numbers go first.
    shown = sorted(most_common, key=lambda name: (isinstance(name, str), name))
    counts = []
    for label in shown:
        counts.append(tuple(pairs[label, prediction] for prediction in shown))
    return Confusion(
        classes=tuple(map(str, shown)),
        counts=tuple(counts),
        hidden_classes=len(rows_by_class) - len(shown),
    )


def _as_texts(line: dict[str, Any]) -> dict[str, str]:
    """Return the values of a line as they are shown, without those that only say where it is."""
    shown = {}
    for name, value in line.items():
        if name in WHERE[1:]:
            continue
        if isinstance(value, str):
            text = value
        elif isinstance(value, float):
            text = f"{value:.4f}"
        else:
            text = json.dumps(value, ensure_ascii=False)
        is_short = len(text) <= MOST_CHARACTERS
        shown[name] = text if is_short else f"{text[:MOST_CHARACTERS]}…"
    return shown
