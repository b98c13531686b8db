"""The predictions of a run's final test, from ``predictions.jsonl``: a
confusion matrix, or samples.
"""

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
"""Of a text in a sample."""
WHERE = ("index", "file", "row", "id")
"""Keys of a line that say which row it is of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """How often each class was taken for which."""

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
    """Return the confusion matrix of a task with classes, of others the first
    rows; ``None`` without predictions.

    A row is texts by name. Raises ConfigError, which names file and line, for a line that
    is no JSON object.
    """
    file, seen = folder / "predictions.jsonl", _Seen()
    if not file.is_file():
        return None
    for line in _lines(file):
        if len(seen.first) < SAMPLES:
            seen.first.append(line)
        if not seen.has_classes:
            if len(seen.first) == SAMPLES:
                break
            continue
        pairs = _pairs(line)
        seen.has_classes = pairs is not None
        seen.is_tagged |= isinstance(line.get("label"), list) and len(set(line["label"])) < len(
            line["label"]
        )
        seen.pairs.update(pairs or ())
    # Lists are the tags of words if one comes twice in a row; else they are the classes of a row
    # that has several.
    lists = bool(seen.first) and isinstance(seen.first[0].get("label"), list)
    if seen.pairs and seen.has_classes and (seen.is_tagged or not lists):
        return _confusion(seen.pairs)
    return [_as_texts(line) for line in seen.first] or None


def _lines(file: Path) -> Iterator[dict[str, Any]]:
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
    """Return class and predicted class of the row, or of each of its words; ``None`` if
    it has no classes.
    """
    label, prediction = line.get("label"), line.get("prediction")
    if isinstance(label, list) and isinstance(prediction, list) and len(label) == len(prediction):
        return [pair for pair in zip(label, prediction, strict=True) if None not in pair]
    if all(isinstance(value, str | int) for value in (label, prediction)):
        return [(label, prediction)]
    return None


def _confusion(pairs: Counter[tuple[Any, Any]]) -> Confusion:
    rows: Counter[Any] = Counter()
    for (label, prediction), count in pairs.items():
        rows[label] += count
        rows[prediction] += 0
    shown = sorted(
        (name for name, _ in rows.most_common(MOST_CLASSES)),
        key=lambda name: (isinstance(name, str), name),
    )
    counts = tuple(tuple(pairs[label, prediction] for prediction in shown) for label in shown)
    return Confusion(
        classes=tuple(map(str, shown)), counts=counts, hidden_classes=len(rows) - len(shown)
    )


def _as_texts(line: dict[str, Any]) -> dict[str, str]:
    shown = {}
    for name, value in line.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = f"{value:.4f}" if isinstance(value, float) else text
        if name not in WHERE[1:]:
            shown[name] = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
    return shown
