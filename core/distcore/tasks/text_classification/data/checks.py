"""What a user should know of rows that can be trained on, but perhaps not as they were meant: one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from distcore.tasks.text_classification.data.labelled import Rows, is_integer
from distcore.tasks.text_classification.options import TextOptions

ENOUGH = 3
"""Rows of a class below which a line names it."""
NAMED = 5
"""Most classes that a line names."""


def check_parts(
    rows: Rows, evaluation: np.ndarray, classes: Sequence[str], options: TextOptions
) -> Iterator[tuple[str, str]]:
    """Yield what is odd: the option that names the file, and a line on its rows, which count from 1 as in errors.

    ``rows``: those of ``options.data``, before the split. ``evaluation``: the class numbers of the evaluation rows.
    """
    counts = Counter(map(str, rows.labels))
    yield from (("data", line) for line in (*_odd_labels(rows, counts), *_rare_classes(rows, counts)))
    evaluated = dict(zip(classes, np.bincount(evaluation, minlength=len(classes)).tolist(), strict=True))
    if options.eval_data is None:
        evaluated = {name: count for name, count in evaluated.items() if counts[name] >= ENOUGH}  # else named above
        source, remedy = "data", "raise --eval-fraction, or give --eval-data a file"
    else:
        source, remedy = "eval_data", "add rows of them"
    if few := {name: str(count) for name, count in evaluated.items() if count < ENOUGH}:
        yield source, f"classes with fewer than {ENOUGH} evaluation rows, too few to judge by: {_listed(few)}; {remedy}"


def check_lengths(cut: int, rows: int, max_length: int) -> Iterator[str]:
    """Yield how many of all rows were cut to ``max_length`` tokens, if any were."""
    if cut:
        yield f"{cut} of {rows} rows have more than {max_length} tokens and are cut; --max-seq-len sets another length"


def _odd_labels(rows: Rows, counts: Counter[str]) -> Iterator[str]:
    """Yield the words among numbers that no other row has: in a CSV file they turn all labels into strings."""
    words = [label for label in counts if not is_integer(label)]
    if words and len(words) < len(counts) and all(counts[word] == 1 for word in words):
        row = rows.labels.index(words[0]) + 1  # type: ignore[arg-type]
        others = f", and {len(words) - 1} more are like it" if len(words) > 1 else ""
        what = f"label {words[0]!r} in row {row} is no number and occurs once{others}"
        yield f"{what}: so all labels are strings; correct it if it is a slip"


def _rare_classes(rows: Rows, counts: Counter[str]) -> Iterator[str]:
    """Yield the classes that have too few rows, with these rows."""
    found: dict[str, list[str]] = {label: [] for label, count in counts.items() if count < ENOUGH}
    for row, label in enumerate(rows.labels, 1) if found else ():
        if str(label) in found:
            found[str(label)].append(str(row))
    if found:
        where = {label: f"row{'s' * (len(numbers) > 1)} {' and '.join(numbers)}" for label, numbers in found.items()}
        yield f"classes with fewer than {ENOUGH} rows, too few to learn from: {_listed(where)}"


def _listed(found: dict[str, str]) -> str:
    named = ", ".join(f"{label!r} ({what})" for label, what in list(found.items())[:NAMED])
    return named + (f", … ({len(found)} classes)" if len(found) > NAMED else "")
