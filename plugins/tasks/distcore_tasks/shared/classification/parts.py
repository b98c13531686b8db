"""The split of labeled rows into datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from distcore_data import ChosenRows
from distcore_tasks.shared.classification.coded import CodedTargets
from distcore_tasks.shared.classification.labels import Labeled, known_labels
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.sources import naming
from distcore_tasks.shared.splits import evaluation_rows, split_rows, without
from distcore_tasks.shared.stored_arrays import Entries, StoredArray

R = TypeVar("R", bound=Labeled)
NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class LabeledPart(Generic[R]):
    """The rows of one dataset."""

    rows: R
    """All rows of the source."""
    numbers: np.ndarray | ChosenRows
    """Numbers of this part's rows, ascending, from 0: int64, or a bit for each of very many."""
    labels: Entries
    """Encoded labels of this part's rows."""


def split_parts(
    rows: R,
    classes: Sequence[str],
    encode: Callable[[Labeled], Entries],
    options: TaskOptions,
    seed: int,
    read: Callable[[str], R],
    *,
    is_drawn: bool = False,
) -> Iterator[tuple[str, LabeledPart[R]]]:
    """Yield the name and the rows of each dataset.

    ``rows`` are those of the training source, and have all ``classes``; ``read`` opens another
    source, whose rows with other labels are bad rows. ``encode`` returns labels as an array. If
    they are class numbers, ``(rows,)``, training keeps a row of each class. Without ``test_data``
    there is no ``test``, and the evaluation rows serve as test rows. Labels in a file stay there.
    ``is_drawn``: the split is drawn, however many rows there are. Raises DataError.
    """
    labels = encode(rows)
    if options.eval_data is None:
        # Arguments of either function.
        split = rows.name, len(rows), options.eval_fraction, seed, _strata(labels)
        if isinstance(labels, StoredArray | CodedTargets):
            evaluation = split_rows(*split)[1] if is_drawn else evaluation_rows(*split)
            yield "train", _many(rows, labels, without(len(rows), evaluation))
            yield "evaluation", _many(rows, labels, [evaluation])
        else:
            train, evaluation = split_rows(*split)
            yield "train", LabeledPart(rows, train, labels[train])
            yield "evaluation", LabeledPart(rows, evaluation, labels[evaluation])
    elif isinstance(labels, StoredArray | CodedTargets):
        yield "train", _many(rows, labels, without(len(rows), NONE))
    else:
        yield "train", LabeledPart(rows, np.arange(len(rows)), labels)
    for name, source in options.held_out.items():
        with naming(name):
            others = read(source)
            known = known_labels(others, classes)
        yield name, LabeledPart(others, known.numbers, encode(known))


def _many(
    rows: R, labels: StoredArray | CodedTargets, blocks: Iterable[np.ndarray]
) -> LabeledPart[R]:
    """Return the rows of ``blocks``, ascending numbers."""
    numbers = ChosenRows.from_blocks(len(rows), blocks)
    return LabeledPart(rows, numbers, labels.only(numbers))


def _strata(labels: Entries) -> Entries:
    """Return class numbers unchanged; for other labels zeros, which make one class of all rows."""
    has_class_numbers = labels.ndim == 1 and labels.dtype.kind == "i"
    if has_class_numbers:
        return labels
    # Broadcast, because that takes no memory.
    return np.broadcast_to(np.int64(0), len(labels))
