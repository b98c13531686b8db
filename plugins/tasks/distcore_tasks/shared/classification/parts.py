"""The split of labeled rows into datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from distcore_data import ChosenRows
from distcore_tasks.shared.arrays import mapped
from distcore_tasks.shared.classification.coded import CodedLabels
from distcore_tasks.shared.classification.labels import Labeled, known_labels
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.sources import naming
from distcore_tasks.shared.splits import evaluation_rows, split_rows, without

R = TypeVar("R", bound=Labeled)
NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class LabeledPart(Generic[R]):
    """The rows of one dataset."""

    rows: R
    """All rows of the source."""
    numbers: np.ndarray | ChosenRows
    """Numbers of this part's rows, ascending, from 0: int64, or a bit for each of very many."""
    labels: np.ndarray
    """Encoded labels of this part's rows."""


def split_parts(
    rows: R,
    classes: Sequence[str],
    encode: Callable[[Labeled], np.ndarray],
    options: TaskOptions,
    seed: int,
    read: Callable[[str], R],
) -> Iterator[tuple[str, LabeledPart[R]]]:
    """Yield the name and the rows of each dataset.

    ``rows`` are those of the training source, and have all ``classes``; ``read`` opens another source, whose rows with
    other labels are bad rows. ``encode`` returns labels as an array. If they are class numbers, ``(rows,)``, training
    keeps a row of each class. Without ``test_data`` there is no ``test``, and the evaluation rows serve as test rows.
    Of labels in a file those for training are in one, too. Raises DataError.
    """
    labels = encode(rows)
    is_coded = isinstance(rows.labels, CodedLabels)
    if options.eval_data is None:
        split = rows.name, len(rows), options.eval_fraction, seed, _strata(labels)
        if is_coded:
            evaluation = evaluation_rows(*split)
            yield "train", _many(rows, labels, evaluation)
        else:
            train, evaluation = split_rows(*split)
            yield "train", LabeledPart(rows, train, labels[train])
        yield "evaluation", LabeledPart(rows, evaluation, _widened(labels[evaluation]))
    elif is_coded:
        yield "train", _many(rows, labels, NONE)
    else:
        yield "train", LabeledPart(rows, np.arange(len(rows)), labels)
    for name, source in options.held_out.items():
        with naming(name):
            others = read(source)
            known = known_labels(others, classes)
        yield name, LabeledPart(others, known.numbers, _widened(encode(known)))


def _many(rows: R, labels: np.ndarray, others: np.ndarray) -> LabeledPart[R]:
    """Return all rows but ``others``."""
    numbers = ChosenRows.of_blocks(len(rows), without(len(rows), others))
    return LabeledPart(rows, numbers, mapped(labels[block] for block in without(len(rows), others)))


def _widened(labels: np.ndarray) -> np.ndarray:
    """Return class numbers as int64, and other labels as they are."""
    return labels.astype(np.int64) if labels.ndim == 1 and labels.dtype.kind == "u" else labels


def _strata(labels: np.ndarray) -> np.ndarray:
    """Return class numbers unchanged, and zeros for other labels, which makes one class of all rows."""
    return labels if labels.ndim == 1 and labels.dtype.kind in "iu" else np.zeros(len(labels), np.uint8)
