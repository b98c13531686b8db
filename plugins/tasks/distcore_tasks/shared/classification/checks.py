"""Warnings about labels that are valid, but may be mistakes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from distcore_tasks.shared.classification.labels import Labeled, each_label, label_counts, rows_with

ENOUGH = 3
"""Number of rows below which a class gets a warning."""
NULL_NAMES = frozenset(
    ("null", "NULL", "nan", "NaN", "-nan", "NA", "N/A", "n/a", "#N/A", "<NA>", "None")
)
"""Texts that tools write for a missing value, and that may also be the name of a class."""
NAMED = 5
"""Maximum number of classes that a warning lists."""


def check_classes(
    rows: Labeled, evaluation: np.ndarray, classes: Sequence[str], held_out: bool
) -> Iterator[tuple[str, str]]:
    """Yield warnings, each with the option of the source.

    ``rows``: those of the option ``data``, before the split. ``evaluation``: number of evaluation
    rows of each class.
    ``held_out``: True if the evaluation rows have their own source.
    """
    counts = Counter[str]()
    for label, count in label_counts(rows).items():
        counts[str(label)] += count
    lines = (
        *_odd_labels(rows, counts),
        *_alike_labels(counts),
        *_nulls(rows, counts),
        *_rare_classes(rows, counts),
    )
    for line in lines:
        yield "data", line
    evaluated = dict(zip(classes, evaluation.tolist(), strict=True))
    if held_out:
        source, remedy = "eval_data", "add rows of them"
    else:
        # Rare classes have a warning already.
        evaluated = {name: count for name, count in evaluated.items() if counts[name] >= ENOUGH}
        source, remedy = "data", "raise --eval-fraction, or give --eval-data a file"
    rare = {name: str(count) for name, count in evaluated.items() if count < ENOUGH}
    if rare:
        problem = f"classes with fewer than {ENOUGH} evaluation rows, too few to judge by"
        yield source, f"{problem}: {_listed(rare)}; {remedy}"


def is_integer(label: object) -> bool:
    """Return True for a label that is an integer in its normal form: ``7``, but not ``07``."""
    return re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", str(label)) is not None


def _odd_labels(rows: Labeled, counts: Counter[str]) -> Iterator[str]:
    """Yield a warning about unique words among numbers: they turn all labels into strings."""
    words = [label for label in counts if not is_integer(label)]
    if not words or len(words) == len(counts):
        return
    if all(counts[word] == 1 for word in words):
        row, _ = next(rows_with(rows, words[:1]))
        others = f", and {len(words) - 1} more are like it" if len(words) > 1 else ""
        problem = f"label {words[0]!r} in {rows.places([row])} is no number and occurs once{others}"
        yield f"{problem}: so all labels are strings; correct it if it is a slip"


def is_header(rows: Labeled) -> bool:
    """Return True if only the first row's label is no number, as a header's is."""
    counts = label_counts(rows)
    words = [label for label in counts if not is_number(label)]
    if len(words) != 1:
        return False
    (word,) = words
    # Of two labels, one of which is rare, the word may well be the other class.
    if counts[word] != 1 or len(counts) < 3:
        return False
    return next(each_label(rows)) == (0, word)


def is_number(label: object) -> bool:
    """Return True for a label that is the text of a number: ``07``, ``1.5``."""
    number = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"
    return re.fullmatch(number, str(label), re.ASCII) is not None


def _nulls(rows: Labeled, counts: Counter[str]) -> Iterator[str]:
    """Yield a warning about a class that is named as tools write a missing value."""
    if named := [label for label in counts if label.strip() in NULL_NAMES]:
        row, _ = next(rows_with(rows, named[:1]))
        remedy = "if it stands for a missing label, fill it in or remove the rows"
        yield f"label {named[0]!r} in {rows.places([row])} is a class; {remedy}"


def _alike_labels(counts: Counter[str]) -> Iterator[str]:
    """Yield a warning about the first two classes that are nearly alike.

    They differ by spaces or capital letters, or are one number.
    """
    label_of_form: dict[object, str] = {}
    for label in counts:
        form: object = "".join(label.split()).casefold()
        if is_number(label):
            form = float(label)
        other = label_of_form.setdefault(form, label)
        if other != label:
            yield (
                f"labels {other!r} and {label!r} are two classes: correct them if they are meant to"
                " be one"
            )
            return


def _rare_classes(rows: Labeled, counts: Counter[str]) -> Iterator[str]:
    """Yield a warning about classes with too few rows, and their rows."""
    rows_by_class: dict[str, list[int]] = {}
    for label, count in counts.items():
        if count < ENOUGH:
            rows_by_class[label] = []
    if not rows_by_class:
        return
    for row, label_of_row in rows_with(rows, rows_by_class):
        rows_by_class[str(label_of_row)].append(row)
    where = {label: rows.places(numbers) for label, numbers in rows_by_class.items()}
    yield f"classes with fewer than {ENOUGH} rows, too few to learn from: {_listed(where)}"


def _listed(classes: dict[str, str]) -> str:
    """Return the first classes, each with the text that ``classes`` has of it."""
    shown = list(classes.items())[:NAMED]
    listed = ", ".join(f"{label!r} ({text})" for label, text in shown)
    if len(classes) > NAMED:
        listed += f", … ({len(classes)} classes)"
    return listed
