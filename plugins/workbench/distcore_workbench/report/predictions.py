"""The predictions of a run's final test, from ``predictions.jsonl``: a matrix, or samples."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distcore import ConfigError

MOST_CLASSES = 20
"""Classes of a confusion matrix; of more, those with most rows are shown, and the others as one."""
OTHERS = "others"
"""Stands in a confusion matrix for the classes that are not shown."""
MOST_WRONG = 5
"""Wrong predictions that are shown."""
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
    """Sorted; of more than are shown, those with most rows, and last ``OTHERS``."""
    counts: tuple[tuple[int, ...], ...]
    """``counts[i][j]``: rows of class i that were predicted as class j."""
    hidden_classes: int
    """Classes that ``OTHERS`` stands for; 0: all are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassReport:
    """How well a class, or a mean over classes, was predicted."""

    name: str
    """Of the class, or what the mean is over."""
    precision: float
    """Part of the rows predicted as the class that are of it; 0 without such rows."""
    recall: float
    """Part of the class's rows that were predicted as it; 0 without such rows."""
    f1: float
    """Harmonic mean of the two; 0 if both are."""
    rows: int
    """Rows of the class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Classified:
    """The predictions of a task with classes."""

    report: tuple[ClassReport, ...]
    """Of each class that the matrix shows, then their means over all classes."""
    confusion: Confusion
    """Classes and predicted classes."""
    wrong: tuple[dict[str, str], ...]
    """Rows whose predictions are wrong, with most confidence first; empty where lines have none."""


Answers = Classified | list[dict[str, str]]
"""The predictions of a run: of a task with classes, or the first rows of another one."""


@dataclass
class _Seen:
    """The content of the lines read so far."""

    pairs: Counter[tuple[Any, Any]] = field(default_factory=Counter)
    wrong: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    """A heap: the least confidence first. The number of the line decides between equal ones."""
    first: list[dict[str, Any]] = field(default_factory=list)
    is_tagged: bool = False
    has_classes: bool = True


def answers_of(folder: Path) -> Answers | None:
    """Return report and confusion matrix of a task with classes, of others the first rows.

    A row is texts by name. ``None`` without predictions. Raises ConfigError, which names file and
    line, for a line that is no JSON object.
    """
    file = folder / "predictions.jsonl"
    if not file.is_file():
        return None
    seen = _Seen()
    for number, line in enumerate(_lines(file)):
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
        _note_wrong(seen, number, line)
    # Lists are the tags of words if one comes twice in a row; else they are the classes of a row
    # that has several, which are no rows and columns of a matrix.
    has_lists = bool(seen.first) and isinstance(seen.first[0].get("label"), list)
    is_one_class_each = seen.is_tagged or not has_lists
    if seen.pairs and seen.has_classes and is_one_class_each:
        return Classified(
            report=tuple(_class_report(seen.pairs)),
            confusion=_confusion(seen.pairs),
            wrong=tuple(
                _as_texts(line, hidden=()) for *_, line in sorted(seen.wrong, reverse=True)
            ),
        )
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


def _note_wrong(seen: _Seen, number: int, line: dict[str, Any]) -> None:
    """Keep a row if its prediction is wrong, and among those with most confidence so far."""
    label, prediction, scores = line.get("label"), line.get("prediction"), line.get("scores")
    confidence = scores.get(str(prediction)) if isinstance(scores, dict) else None
    if not isinstance(confidence, float | int) or label == prediction:
        return
    shown = {name: value for name, value in line.items() if name != "scores"}
    # Of equal confidence the earlier row comes first.
    heapq.heappush(seen.wrong, (float(confidence), -number, shown | {"confidence": confidence}))
    if len(seen.wrong) > MOST_WRONG:
        heapq.heappop(seen.wrong)


def _rows_by_class(pairs: Counter[tuple[Any, Any]]) -> Counter[Any]:
    """Return the number of rows of each class; a class that is only predicted has none."""
    rows_by_class: Counter[Any] = Counter()
    for (label, prediction), count in pairs.items():
        rows_by_class[label] += count
        rows_by_class[prediction] += 0
    return rows_by_class


def _shown_classes(rows_by_class: Counter[Any]) -> list[Any]:
    """Return the classes with most rows, sorted."""
    most_common = [name for name, _ in rows_by_class.most_common(MOST_CLASSES)]
    # Numbers and texts cannot be compared: the numbers go first.
    return sorted(most_common, key=lambda name: (isinstance(name, str), name))


def _confusion(pairs: Counter[tuple[Any, Any]]) -> Confusion:
    """Return the confusion matrix of counted pairs of class and predicted class."""
    rows_by_class = _rows_by_class(pairs)
    shown = _shown_classes(rows_by_class)
    place = {name: index for index, name in enumerate(shown)}
    hidden_classes = len(rows_by_class) - len(shown)
    size = len(shown) + (hidden_classes > 0)
    counts = [[0] * size for _ in range(size)]
    for (label, prediction), count in pairs.items():
        # The last place is that of the others.
        counts[place.get(label, size - 1)][place.get(prediction, size - 1)] += count
    return Confusion(
        classes=(*map(str, shown), *([OTHERS] if hidden_classes else [])),
        counts=tuple(map(tuple, counts)),
        hidden_classes=hidden_classes,
    )


def _class_report(pairs: Counter[tuple[Any, Any]]) -> Iterator[ClassReport]:
    """Yield precision, recall and F1 of each class that is shown, and the means over all classes:
    one weighs classes alike, the other by their rows.
    """
    rows_by_class = _rows_by_class(pairs)
    predicted: Counter[Any] = Counter()
    for (_, prediction), count in pairs.items():
        predicted[prediction] += count
    reports = {}
    for name, rows in rows_by_class.items():
        right = pairs[name, name]
        reports[name] = ClassReport(
            name=str(name),
            precision=right / max(1, predicted[name]),
            recall=right / max(1, rows),
            f1=2 * right / max(1, predicted[name] + rows),
            rows=rows,
        )
    for name in _shown_classes(rows_by_class):
        yield reports[name]
    total = sum(rows_by_class.values())
    yield _mean("macro avg", list(reports.values()), dict.fromkeys(reports, 1.0), total)
    yield _mean("weighted avg", list(reports.values()), rows_by_class, total)


def _mean(
    name: str, reports: Sequence[ClassReport], weights: Mapping[Any, float], rows: int
) -> ClassReport:
    """Return the weighted mean of ``reports``; ``weights`` are in their order."""
    of_class = list(weights.values())
    total = sum(of_class) or 1

    def mean(values: Iterator[float]) -> float:
        return sum(w * value for w, value in zip(of_class, values, strict=True)) / total

    return ClassReport(
        name=name,
        precision=mean(report.precision for report in reports),
        recall=mean(report.recall for report in reports),
        f1=mean(report.f1 for report in reports),
        rows=rows,
    )


def _as_texts(line: dict[str, Any], hidden: Sequence[str] = WHERE[1:]) -> dict[str, str]:
    """Return the values of a line as they are shown, without ``hidden``: by default those that only
    say where it is.
    """
    shown = {}
    for name, value in line.items():
        if name in hidden:
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
