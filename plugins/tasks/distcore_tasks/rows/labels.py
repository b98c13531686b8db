"""Labels of rows, which are known before any row is encoded: the split and the classes need them.

Memory is for each distinct label; a number per row is in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import ChosenRows, data_format, pass_over
from distcore_tasks.rows.label_kind import LabelKind
from distcore_tasks.rows.pipeline import RowPipeline
from distcore_tasks.rows.sources import SizedPass, Values, open_source, read_from
from distcore_tasks.shared.classification.coded import CodedLabels, LabelCoder
from distcore_tasks.shared.classification.heads import in_order_of_head
from distcore_tasks.shared.classification.labels import row_places
from distcore_tasks.shared.classification.parts import split_parts
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.splits import without
from distcore_tasks.shared.stored_arrays import Entries, stored
from distcore_tasks.shared.streams.values import AT_ONCE

LABELS = "labels"
"""Column with the encoded label of each row."""


@dataclass(frozen=True, eq=False, slots=True)
class LabeledValues:
    """Values of a source with their labels; implements ``Labeled``."""

    values: Values[Any]
    """The values."""
    labels: Any
    """One label, or list of labels, per value: a sequence, or a ``StoredArray`` of numbers."""

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        return self.values.name

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def places(self, rows: Sequence[int]) -> str:
        """Return the places of values in their source, for messages."""
        return row_places(self.values.numbers(np.array(rows, np.int64)).tolist())

    def problem(self, row: int, what: str) -> DataError:
        """Return the error of a value."""
        return self.values.problem(row, what)


@dataclass(frozen=True, eq=False)
class OpenedParts:
    """The datasets of a run."""

    sources: Sequence[Values[Any]]
    """All values of each source, those of ``data`` first."""
    values: Mapping[str, Values[Any]]
    """Values of each dataset, by name."""
    targets: Mapping[str, Entries] = field(default_factory=dict)
    """Encoded label of each value, ``(rows, …)``, by the name of the dataset; empty for rows
    without labels.
    """


def labeled_parts(
    pipeline: RowPipeline[Any], kind: LabelKind, seed: int
) -> tuple[OpenedParts, dict[str, Any]]:
    """Split the rows of ``data``, open the other sources, and encode all labels.

    Returns the datasets and what the pipeline learned: ``labels``, of the classes in the order of
    their numbers, and ``remarks``, warnings with the option of their source. Rows with other labels
    than the classes of ``data`` are bad rows. Raises DataError.
    """
    options: TaskOptions = pipeline.options
    read = partial(open_labeled, pipeline=pipeline, kind=kind)
    whole = read(options.data)
    labels = in_order_of_head(kind.classes(whole), options)
    classes = [str(label) for label in labels]
    encode = partial(kind.encode, classes=classes)
    # A checkpoint knows stored rows by a split that was drawn, however many rows there are.
    is_drawn = not options.stream
    split = split_parts(whole, classes, encode, options, seed, read, is_drawn=is_drawn)
    parts = dict(split)
    values = {name: part.rows.values.only(_blocks(part.numbers)) for name, part in parts.items()}
    targets = {name: part.labels for name, part in parts.items()}
    judged = next(targets[name] for name in targets if name.startswith("evaluation"))
    remarks = [*kind.warnings(whole, judged, classes, options.eval_data is not None)]
    sources = [whole.values, *(parts[name].rows.values for name in options.held_out)]
    opened = OpenedParts(sources, values, targets)
    return opened, {"labels": labels, "remarks": remarks}


def labels_folder(entry: Path, dataset: str) -> Path:
    """Return the folder of a cache entry with the labels of a streamed dataset."""
    return entry / f"{dataset}.labels"


def _blocks(numbers: np.ndarray | ChosenRows) -> Iterable[np.ndarray]:
    return numbers.blocks() if isinstance(numbers, ChosenRows) else [numbers]


def open_labeled(source: str, pipeline: RowPipeline[Any], kind: LabelKind) -> LabeledValues:
    """Return the values of a source with their labels, after a pass over all of them.

    Rows whose labels are none are bad rows. Raises DataError.
    """
    values, file = open_source(source, pipeline), read_from(source, pipeline)
    labels = map(pipeline.label, SizedPass(values, file))
    is_csv = file is not None and data_format(file) == ".csv"
    if kind.are_numbers:
        return _numbers(values, labels, kind, is_csv)
    coder = LabelCoder()
    for label in labels:
        coder.add(label)
    return _good_labels(values, coder.coded(), kind, is_csv)


def _numbers(
    values: Values[Any], given: Iterator[object], kind: LabelKind, is_csv: bool
) -> LabeledValues:
    """Return the values whose labels are numbers, and these, fp32."""
    bad = dict[int, DataError]()

    def good() -> Iterator[np.ndarray]:
        start = 0
        while labels := [*islice(given, AT_ONCE)]:
            labels = kind.from_csv(labels) if is_csv else labels
            problems = [*kind.label_problems(labels)]
            for place, what in enumerate(problems, start):
                if what:
                    bad[place] = values.problem(place, what)
                    pass_over(bad[place])
            pairs = zip(labels, problems, strict=True)
            yield np.array([label for label, what in pairs if not what], np.float32)
            start += len(labels)

    numbers = stored(good())
    if len(bad) == len(values):
        raise next(iter(bad.values()))
    if bad:
        values = values.only(without(len(values), np.array([*bad])))
    return LabeledValues(values, numbers)


def _good_labels(
    values: Values[Any], given: CodedLabels, kind: LabelKind, is_csv: bool
) -> LabeledValues:
    """Return the values with good labels, and these."""
    bad = dict[int, str]()
    names = {code: given.names[code] for code in range(len(given.names))}
    while wrong := _wrong(names, kind, is_csv):
        errors = _errors(values, given, wrong)
        if len(wrong) == len(names):
            raise errors[0]
        bad |= wrong
        # The labels of a CSV file may be integers now.
        names = {code: given.names[code] for code in names if code not in wrong}
    labels: Sequence[Any] = kind.from_csv([*names.values()]) if is_csv else [*names.values()]
    named = dict(zip(names, labels, strict=True))
    converted = [named.get(code, name) for code, name in enumerate(given.names)]
    coded = CodedLabels(given.codes, converted)
    if not bad:
        return LabeledValues(values, coded)
    coded, rows = coded.without(bad)
    return LabeledValues(values.only(rows.blocks()), coded)


def _wrong(names: Mapping[int, Any], kind: LabelKind, is_csv: bool) -> dict[int, str]:
    """Return what is wrong with labels, by code."""
    some = [*names.values()]
    labels = kind.from_csv(some) if is_csv else some
    problems = zip(names, kind.label_problems(labels), strict=True)
    return {code: what for code, what in problems if what}


def _errors(values: Values[Any], labels: CodedLabels, wrong: Mapping[int, str]) -> list[DataError]:
    """Pass over the values of some labels, and return their errors."""
    errors = list[DataError]()
    for row in labels.rows_of(wrong):
        errors.append(values.problem(row, wrong[labels.code(row)]))
        pass_over(errors[-1])
    return errors
